"""Formats of the files that workstation and device share: bundles, adapters, journals, run folders."""
