"""From differing bytes to a kind of fault: one small module a kind; ``dispatch`` asks them, ``registry`` lists them."""
