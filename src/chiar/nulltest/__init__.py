"""Is the routing signal more than noise? What `chiar nulltest` measures, one question a file."""
