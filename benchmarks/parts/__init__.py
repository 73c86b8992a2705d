"""What the scoring benchmarks share: workloads, contenders, measuring, tables."""
