"""What a machine is: processes, control groups, GPUs, addresses, versions. No torch."""
