"""Tools on top of the library, which never imports them: command line, lab, benchmarks, tasks."""
