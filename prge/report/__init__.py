"""Pages that open from disk: blocks of plain text, their markup, and charts. One file, no network."""
