"""Reading examples, and cutting them into batches."""
