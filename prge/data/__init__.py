"""Data: rows of files to examples, and metrics of scored examples; used by the exporter and the device."""
