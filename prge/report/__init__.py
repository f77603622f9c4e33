"""Reports as single files that open without a network: blocks of plain text, their rendering, charts."""
