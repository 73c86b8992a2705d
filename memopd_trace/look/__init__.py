"""Looking at traces: totals (`stats`), lineage and single calls (`show`), what separates two traces (`diff`)."""
