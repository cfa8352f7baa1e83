"""Pictures and tables of finished runs, made from their run folders."""
