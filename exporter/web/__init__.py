"""HTTP: the pages and the server."""
