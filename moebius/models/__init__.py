"""Model families as mcore GPTModels: shapes, name tables, modules, and reading and writing of Hugging Face folders."""
