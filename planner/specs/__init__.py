"""What is given: hardware, model, engine and workload. The only room that reads files."""
