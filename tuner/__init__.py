"""Ask, compile, verify, measure, tell: the tuning loop, its engines, its store and the service around them."""
