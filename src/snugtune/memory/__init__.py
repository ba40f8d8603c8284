"""What a callable would allocate on a card, found out without one."""
