"""The one exception that the command line turns into a sentence."""


class UserError(ValueError):
    """Something the user can put right: a bad value, file or folder.

    The message is one clear sentence that names the value and says what is allowed. Scripts print it
    without a traceback and exit with a non-zero status.
    """


class InUseError(UserError):
    """Another process uses what is asked for."""
