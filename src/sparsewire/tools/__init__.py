"""What is built on the library and never imported by it: command line, lab, benchmarks, tasks."""
