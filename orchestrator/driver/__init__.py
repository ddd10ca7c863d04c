"""The control loop: it follows a generation of the gang, and starts the next one."""
