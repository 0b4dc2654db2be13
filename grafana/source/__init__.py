"""Makes ``grafana/dashboards/``: ``python -m grafana.source``.

One file a dashboard. :mod:`grafana.source.queries` is what they ask, :mod:`grafana.source.parts` what they are made of.
"""
