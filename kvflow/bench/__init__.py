"""The benchmarks of kvflow. Each measures against a peer or a physical limit in the same run."""
