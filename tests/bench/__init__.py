"""What a scrape costs, beside a bare ``prometheus_client`` page and nvitop-exporter: ``python -m tests.bench``.

Everything is measured in one run, in turns, so that whatever else the machine does hits all alike; a speed counts only
as the ratio to the bare page of the same run. All read the same pretend NVML (:mod:`tests.fakes.nvml`), whose values
move before every scrape and whose calls take a microsecond: these are the exporters' own costs, not a driver's.
"""
