"""Why something that is computed from the logits of a linear was not fused with it."""

from enum import Enum


class Reason(Enum):
    """Why something that is computed from the logits of a linear was not fused with it."""

    NO_LINEAR = "its logits do not come from a linear layer"
    LOGITS_USED = "the logits, or something between them and the loss, are also used elsewhere"
    LOGITS_RETURNED = "the program returns its logits; return the loss only to have them fused"
    TRANSFORMED_LOGITS = "the logits are changed between the linear and the loss"
    NOT_LOG_PROBABILITIES = "the input of nll_loss is not a log_softmax"
    NOT_A_LOG_PROBABILITY = "its logits are gathered, but not into the log-probability of one label a row"
    NOT_FOLLOWED = "what the program makes of its log-probabilities is none of the losses that are known here"
    CLASS_DIMENSION = "the vocabulary is not the class dimension of the loss"
    CLASS_PROBABILITIES = "the targets are class probabilities"
    CLASS_WEIGHTS = "it has class weights that are not supported"
    DTYPE = "the linear's operands have different dtypes, or one that is not supported"
    DISTRIBUTED = "an operand is a distributed tensor"
    TENSOR_PARALLEL = "thunder.distributed divides its weight among ranks by row_parallel, not by column_parallel"
    OPERAND_MODIFIED = "a tensor is changed in place that the loss, or a prediction beside it, may depend on"
    DYNAMIC = "a shape or a setting is not known when the trace is compiled"
    DEPRECATED_ARGUMENT = "it has the deprecated argument size_average or reduce"
    NOT_WRITTEN = "the backend cannot write an operation back that fusion needs"
    NOT_THUNDER = "thunder does not compile its part of the graph"


class NotFused(Exception):
    """Raised while matching; becomes a decision that the user can read.

    Args:
        reason: what prevents fusion.
        detail: which operation or value it was.
    """

    def __init__(self, reason: Reason, detail: str = ""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
