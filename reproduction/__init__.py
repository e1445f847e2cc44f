"""Every table and figure of the paper: specs in, records out, pages as pure functions of records."""
