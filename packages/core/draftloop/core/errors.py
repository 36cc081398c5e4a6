"""Errors a user can act on: one clear line that says what is wrong and what to do."""

USER_ERROR_EXIT_CODE = 2


class DraftloopError(Exception):
    """Bad input or a broken environment. The message is one line and names the remedy.

    The command line prints it without a traceback and exits with `USER_ERROR_EXIT_CODE`.
    """


class ConfigError(DraftloopError):
    """The config file or a command-line override is wrong."""


class CheckpointError(DraftloopError):
    """A drafter checkpoint cannot be used: a tensor is missing, extra, misshaped or damaged."""


class ManifestError(DraftloopError):
    """A drafter belongs to another target, other layers or another vocabulary."""


class PromptError(DraftloopError):
    """A prompt file is empty, malformed, or longer than the context."""


class TrainingError(DraftloopError):
    """The processes that train together did not form a group, or one of them is lost."""


class ServerError(DraftloopError):
    """An SGLang server did not start, died, or refused a request."""


class BusyError(DraftloopError):
    """A roll-out is under way."""


class HookError(DraftloopError):
    """SGLang's code differs from what a plugin hook expects."""
