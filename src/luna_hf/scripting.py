"""What the commands of this repository share: errors for their users."""


class UserError(ValueError):
    """A mistake that the user can fix; commands print the message without a traceback."""
