"""What trainyard costs, beside what people use instead: ``python -m benchmarks``."""
