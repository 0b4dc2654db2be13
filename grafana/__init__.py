"""The dashboards: their source, the JSON that it makes, and what Grafana needs to provision them."""
