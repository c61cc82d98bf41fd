"""Real traffic: traces in many formats, and the simulator that scores a policy by them."""
