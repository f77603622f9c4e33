"""What lies on disk between the sides: bundles, adapters, journals, run folders; read within bounds."""
