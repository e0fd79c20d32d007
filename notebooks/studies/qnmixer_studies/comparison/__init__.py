"""Methods of several runs, compared on the same scans."""
