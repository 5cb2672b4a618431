"""The ground floor: what a reader needs before any chapter makes sense."""


class UserError(Exception):
    """Something the user can put right: shown as one line that names the flag and the fix, exit status 2."""
