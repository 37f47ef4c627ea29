"""What the benchmarks of the host share: an engine without a device, and clocks on its phases."""
