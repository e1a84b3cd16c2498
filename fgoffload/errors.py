"""The exceptions of fgoffload.

Every error that a user can cause says three things: the value as it was typed, the limit that it broke, and what to do.

    OffloadError
    ├── ConfigError        a flag or an option cannot be what it is (also a ValueError)
    ├── PlanError          a plan does not fit the model, or no plan fits the budget
    ├── IntegrationError   a framework lacks a symbol, or a selected tag found nothing to do
    ├── StateError         tensors or calls came in a state in which results could not be right (also a RuntimeError,
    │                      as what torch raises for a saved tensor that was changed in place)
    └── InternalError      a fault of fgoffload itself: please report it
"""


class OffloadError(Exception):
    """Base of all errors that fgoffload raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """A flag or an option cannot be what it is."""


class PlanError(OffloadError):
    """A plan does not fit the model, or no plan fits the budget."""


class IntegrationError(OffloadError):
    """A framework lacks a symbol that is needed, or a selected tag found nothing to do."""


class StateError(OffloadError, RuntimeError):
    """Tensors or calls came in a state in which results could not be right."""


class InternalError(OffloadError):
    """A fault of fgoffload itself."""
