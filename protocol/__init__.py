"""What nodes say to each other, and the pure rules that decide what is believed. No I/O, no clock, no torch."""
