"""Real servers on loopback ports. Free of pytest, so that benchmarks and examples can start them too."""
