"""Breaks the implementation on purpose, one line at a time, and shows that the tests notice.

    python tests/mutations.py                 # all; exits with 1 if one survives
    python tests/mutations.py --only engine   # those whose file or text has "engine" in it

Each mutation runs its tests on a copy of the package, in a process of its own. None needs a GPU: what runs there is
interpreted, Triton's kernels by Triton and nvFuser's definitions by `fusion_interpreter`. `test_mutations` checks that
every one of them still applies.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).parent.parent
KINDS = ("sign", "divisor", "mask", "index")

PLANS = "tests/test_properties.py::test_every_plan"
CHUNKS = f"{PLANS}[cpu-chunks]"
STAGED = f"{PLANS}[cpu-staged]"
TERMS = "tests/test_terms.py"
TRACED = "tests/test_properties.py::test_traced"
SPECIAL = "tests/test_properties.py::test_logits_that_are_not_ordinary"
ALONE = "tests/test_opinfo.py::test_samples_of_thunder"
NVFUSER = "tests/test_nvfuser.py"
PROGRAM = "tests/test_program.py::test_the_printed_program_is_the_region"
RUNS = "tests/test_program_runs.py"
CHOICE = "tests/test_plan.py"
ROW_KERNELS = "tests/test_row_kernels.py"
TRITON_ROWS = (f"{ROW_KERNELS}::test_in_the_interpreter", "tests/test_triton_rows.py::test_in_the_interpreter")
FREQUENT_ROWS = "tests/test_numerics.py::test_rows_of_dw_with_the_most_targets"
ONE_PASS = "tests/test_properties.py::test_one_pass"
SCALING = "tests/test_numerics.py::test_finished_gradients_are_scaled_with_one_rounding"
OPERATOR = "tests/test_operator.py"
PARALLEL = "tests/test_vocab_parallel.py"
BACKEND = "tests/test_backend.py"
BUDGET = "tests/test_plan.py::test_logits_that_are_computed_again_fill_the_budget"
BATCH_INVARIANT = "tests/test_batch_invariant.py"
EXPOSED = "tests/test_bench.py::test_collectives_that_no_other_kernel_hides"
SECOND_BACKWARD = "tests/test_numerics.py::test_second_backward"


@dataclass(frozen=True)
class Mutation:
    """One change of the source, and the tests of which at least one must fail."""

    kind: str
    """One of `KINDS`"""
    file: str
    """Below thunder_flce/"""
    before: str
    """Stands in the file exactly once"""
    after: str
    tests: tuple[str, ...] = (PLANS,)

    @property
    def path(self) -> Path:
        """The file, from the root of the repository."""
        return Path("thunder_flce", self.file)

    def applied(self, text: str) -> str:
        """The file's text with the change.

        Raises:
            ValueError: where the source has moved on.
        """
        if text.count(self.before) != 1:
            raise ValueError(f"{self.path} has {text.count(self.before)} times, not once: {self.before}")
        return text.replace(self.before, self.after)


def _of(file: str, *changes: tuple[str, str, str], tests: tuple[str, ...] = (PLANS,)):
    return [Mutation(kind, file, before, after, tests) for kind, before, after in changes]


MUTATIONS = [
    *_of(
        "execution/gradient_accumulation.py",
        ("mask", "or not 0 < enough <= first.stop:", "or first.stop < enough:"),
        tests=("tests/test_vocab_parallel.py::test_a_rank_without_columns_and_rows_without_labels",),
    ),
    *_of(
        "operation/loss.py",
        ("sign", "value = row.log_sum - (shifted if exact", "value = row.log_sum + (shifted if exact"),
        ("sign", "shifted = row.target_logit - row.max", "shifted = row.target_logit + row.max"),
        (
            "sign",
            'row.log_sum * total - row.moments["weighted_sum"]',
            'row.log_sum * total + row.moments["weighted_sum"]',
        ),
        ("sign", "one_hot = (1 - loss.label_smoothing)", "one_hot = (1 + loss.label_smoothing)"),
        ("sign", 'row.log_sum - row.moments["expected"]', 'row.log_sum + row.moments["expected"]'),
        ("sign", "row.target_logit - row.max - row.log_sum", "row.target_logit - row.max"),
        ("sign", 'log(row.moments["sum_sq"])', '-log(row.moments["sum_sq"])'),
        ("divisor", "self.label_smoothing / columns * smooth", "self.label_smoothing / (columns + 1) * smooth"),
        (
            "divisor",
            "one_hot, upstream * (loss.label_smoothing / columns)",
            "one_hot, upstream * (loss.label_smoothing / (columns + 1))",
        ),
        ("divisor", "weights.total * (loss.label_smoothing / columns)", "weights.total * loss.label_smoothing"),
        ("divisor", "values = [value / divisor for", "values = [value / divisor / 2 for"),
        ("divisor", 'row.moments["shifted_sum"] / columns', 'row.moments["shifted_sum"] / (columns + 1)'),
        ("mask", "any(OUTPUTS[name].ignored is None for", "any(OUTPUTS[name].ignored == 7 for"),
        ("mask", "is_index=True, ignored=-1", "is_index=True, ignored=0"),
        ("mask", "value = weights.at_target * value", "pass"),
        ("mask", "probability = upstream * weights.at_target", "probability = upstream"),
        ("index", "values[0] if len(values) == 1 else values[0] + values[1]", "values[0]"),
        tests=(CHUNKS,),
    ),
    *_of(
        "operation/loss.py",
        ("sign", "one_hot = coefficients.one_hot * logits", "one_hot = -coefficients.one_hot * logits"),
        ("mask", "one_hot.sum(-1) if len(logits.is_target.shape) > 2 else one_hot", "one_hot"),
        ("sign", "coefficients.probability - coefficients.entropy", "coefficients.probability + coefficients.entropy"),
        ("divisor", "uniform if logits.class_weight is None else uniform * logits.class_weight", "uniform"),
        ("mask", "gradient if slope is None else gradient * slope", "gradient"),
        tests=(PROGRAM,),
    ),
    *_of(
        "execution/shards.py",
        ("sign", "torch.exp(maxima - row_max + log_sums)", "torch.exp(maxima - row_max - log_sums)"),
        ("sign", "(values == values.amax(0))", "(values == values.amin(0))"),
        ("index", "log_sums.gather(0, largest).expm1_()", "log_sums.gather(0, largest).exp_()"),
        ("mask", 'torch.where(maxima == float("-inf"), 0, torch.exp(', "(torch.exp("),
        ("mask", "torch.where(is_largest, columns, NO_COLUMN)", "columns"),
        ("index", "NO_COLUMN).amin(0)", "-1).amax(0)"),
        tests=(PARALLEL,),
    ),
    *_of(
        "execution/shards.py",
        ("mask", "dist.all_reduce(entry, group=process_group(shard))", "pass"),
        tests=("tests/test_target_weights.py::test_divided_vocabulary",),
    ),
    *_of(
        "data_parallel.py",
        ("divisor", 'changed["num_items"] = _times(arguments["num_items"], ranks)', "pass"),
        ("index", "number.to(wide) * factor", "number * factor"),
        ("mask", "loss.ignore_index if is_index else 0", "loss.ignore_index"),
        ("divisor", "float(ranks)", "1.0"),
        ("divisor", "lambda grad: grad / ranks", "lambda grad: grad"),
        ("mask", "padded(target.long(), loss.ignore_index if is_index else 0)", "padded(target.long())"),
        ("mask", "int(refused is not None)", "0"),
        tests=(PARALLEL,),
    ),
    *_of(
        "execution/steps.py",
        ("sign", "largest = largest if region.loss.logit_scale > 0 else -largest", "pass"),
        ("mask", "torch.where(targets.is_here, entry.to(part.row_max.dtype), 0)", "entry.to(part.row_max.dtype)"),
        ("index", "argmax=part.argmax + shard.start", "argmax=part.argmax"),
        ("index", "slice(first + block.start, first + block.stop)", "block"),
        (
            "divisor",
            'region.empty("dX_part", (dlogits.shape[0], weight.shape[1]), region.input_grad_dtype)',
            'region.empty("dX_part", (dlogits.shape[0], weight.shape[1]), region.operands.dtype)',
        ),
        ("divisor", "torch.mul(source, factor, out=out)", "out.copy_(source)"),
        tests=(PARALLEL,),
    ),
    *_of(
        "execution/row_loss.py",
        (
            "index",
            "class_weight = class_weight[shard.start : shard.start + shard.columns]",
            "class_weight = class_weight[: shard.columns]",
        ),
        tests=(PARALLEL,),
    ),
    *_of(
        "execution/token_parts.py",
        ("mask", "of_rows = valid[index]", "of_rows = torch.ones_like(valid[index])"),
        ("mask", "valid.index_fill(0, rows.order[rows.count :], False)", "valid"),
        ("index", "valid_first[:, :count].sort(1).values", "valid_first[:, :count]"),
        ("index", "start = self.shard.rank * self.own.total", "start = 0"),
        ("divisor", "int(of_parts.sum(1).max())", "int(of_parts.sum(1)[0])"),
        tests=(PARALLEL,),
    ),
    *_of(
        "vocab_parallel.py",
        ("mask", "if first != other:", "if first is other:"),
        ("mask", "max(min(start + rows, vocab) - start, 0)", "rows"),
        ("index", "in_order = [sum(all_rows[:rank])", "in_order = [sum(all_rows[: rank + 1])"),
        ("divisor", "map(min, zip(*memories, strict=True))", "memories[dist.get_rank(group)]"),
        ("mask", "    _told_by_all(parallel.process_group, str(error))\n", ""),
        ("mask", "if isinstance(told, str):", "if False:"),
        ("mask", 'kind = "a DTensor, " if isinstance(value, DTensor) else ""', 'kind = ""'),
        tests=(PARALLEL,),
    ),
    *_of(
        "functional.py",
        ("mask", "        arguments = whole_class_weight(arguments)\n", ""),
        tests=(PARALLEL,),
    ),
    *_of(
        "operation/arguments.py",
        ("mask", "if isinstance(value, int) and not -(2**63) <= value < 2**63:", "if False:"),
        tests=("tests/test_arguments.py", "tests/test_kl_divergence.py::test_bad_input"),
    ),
    *_of(
        "token_functions.py",
        ("mask", "if not callable(token_loss) and not isinstance(token_loss, tuple):", "if False:"),
        tests=("tests/test_arguments.py",),
    ),
    *_of(
        "kl_divergence.py",
        ("mask", "        loss = replace(loss, ignore_index=NOTHING_IGNORED)\n", "        pass\n"),
        tests=("tests/test_kl_divergence.py",),
    ),
    *_of(
        "planning/choose.py",
        ("divisor", "problem.whole_vocab * EXACT_TOKENS_PER_COLUMN", "problem.vocab * EXACT_TOKENS_PER_COLUMN"),
        tests=(PARALLEL,),
    ),
    *_of(
        "dtensor.py",
        ("sign", "return grad, None\n", "return -grad, None\n"),
        ("divisor", "result = _Sum.apply(result, self.mesh.get_group(at))", "pass"),
        ("divisor", "Partial() if at in summed_over else p for", "p for"),
        ("mask", "sequence_parallel=divides_tokens[at]", "sequence_parallel=False"),
        ("index", "range(input.ndim - 1)", "range(input.ndim)"),
        ("divisor", "for k in range(at + 1) if", "for k in range(at, at + 1) if"),
        tests=("tests/test_dtensor.py",),
    ),
    *_of(
        "graph/early_reduction.py",
        ("divisor", "grad.contiguous(), dist.ReduceOp.AVG", "grad.contiguous(), dist.ReduceOp.SUM"),
        ("divisor", "dist.all_reduce(grad, dist.ReduceOp.AVG,", "dist.all_reduce(grad, dist.ReduceOp.SUM,"),
        ("mask", " and not _is_local(bsym):", ":"),
        ("index", "reduced.bound_symbols += moved.get(id(bsym), [])", "pass"),
        tests=("tests/test_two_ranks.py",),
    ),
    *_of(
        "graph/rules.py",
        ("mask", "if _text(vocab_parallel) != text:", "if False:"),
        (
            "mask",
            "    if given is not None and given.value is None:\n        _add_check(given)\n",
            "    if given is not None and given.value is None:\n        pass\n",
        ),
        tests=("tests/test_thunder_ranks.py::test_other_ranks",),
    ),
    *_of(
        "graph/rules.py",
        ("mask", '_add_check(fields["input_grad_dtype"])', "pass"),
        tests=("tests/test_thunder_ranks.py::test_another_input_grad_dtype",),
    ),
    *_of(
        "graph/distributed.py",
        ("index", "if len(sources) == len(bsyms):", "if False:"),
        tests=("tests/test_thunder_ranks.py",),
    ),
    *_of(
        "operators.py",
        ("mask", "given = with_all_tokens(given, agreement.shard)", "pass"),
        tests=("tests/test_two_ranks.py",),
    ),
    *_of(
        "graph/matching/logits_path.py",
        ("mask", "terms=(replace(term, input=summed.args[0]),), group=group", "group=group"),
        ("mask", "if layer_type is not TensorParallelLayerType.COLUMN_PARALLEL_LINEAR or", "if"),
        ("mask", "if path.group is not None:", "if False:"),
        tests=("tests/test_two_ranks.py", "tests/test_thunder_ranks.py"),
    ),
    *_of(
        "graph/distributed.py",
        ("mask", " and get_skip_data_parallel_grad_sync()", ""),
        tests=("tests/test_two_ranks.py",),
    ),
    *_of(
        "labels.py",
        ("divisor", "count.float() / dist.get_world_size(group)", "count.float()"),
        ("mask", "(target != ignore_index).sum()", "torch.tensor(target.numel())"),
        ("index", "labels[..., 1:], torch.full_like(last", "labels[..., :-1], torch.full_like(last"),
        tests=("tests/test_labels.py",),
    ),
    *_of(
        "execution/row_loss.py",
        ("sign", "probability - g_p, one_hot - g_p", "probability - g_p, one_hot + g_p"),
        ("sign", "probability = probability + steps.let(", "probability = probability - steps.let("),
        ("sign", "(statistics.row_log_sum - entropy)", "(statistics.row_log_sum + entropy)"),
        ("sign", "(statistics.row_max + statistics.row_log_sum)", "(statistics.row_max - statistics.row_log_sum)"),
        ("divisor", "grad if divisor is None else grad / divisor", "grad"),
        ("divisor", "divisor = rows.mask_ignored(at_target).sum()", "pass"),
        ("divisor", 'torch.where(operands.num_items == 0, float("inf"), operands.num_items)', "operands.num_items"),
        ("divisor", "2 * loss.z_loss * of_loss", "loss.z_loss * of_loss"),
        ("divisor", "hits.sum().to(region.operands.row_dtype) / rows.valid_count", "hits.sum() / rows.total"),
        ("mask", "weighted(of_rows)", "of_rows"),
        ("mask", "weighted(z_term)", "z_term"),
        ("mask", "rows.mask_ignored(grad if divisor", "(grad if divisor"),
        ("mask", "rows.mask_ignored(at_target)", "at_target"),
        ("mask", "rows.mask_ignored(value, fill=-1)", "value"),
        ("mask", "rows.returned(rows.mask_ignored(value, output.ignored)", "rows.returned((value)"),
        ("mask", "if self._scale != 1:", "if False:"),
        ("index", "class_weight[rows.target], ", "class_weight[rows.target - 1], "),
        (
            "index",
            "None if vector is None else vector[chunk]",
            "None if vector is None else vector[: chunk.stop - chunk.start]",
        ),
        ("index", "self._z_term[chunk]", "self._z_term[: chunk.stop - chunk.start]"),
        tests=(CHUNKS,),
    ),
    *_of(
        "execution/steps.py",
        ("sign", "at_targets.reshape(-1), alpha=-1)", "at_targets.reshape(-1), alpha=1)"),
        ("sign", "if region.loss.logit_scale > 0 else torch.argmin", "if True else torch.argmin"),
        ("mask", "torch.where(is_here, coefficients.one_hot, 0)", "coefficients.one_hot"),
        (
            "index",
            "None if class_weight is None else class_weight[column]",
            "None if class_weight is None else class_weight[0]",
        ),
        tests=(CHUNKS,),
    ),
    *_of(
        "execution/steps.py",
        ("mask", "None if number else region.bias", "region.bias"),
        ("mask", "bias=bias, accumulate=number > 0", "bias=bias, accumulate=False"),
        ("index", "bias[columns], weight[columns]", "bias[columns], weight[: buffer.logits.shape[1]]"),
        ("index", "key=lambda at: xs[at].shape[1])", "key=lambda at: -xs[at].shape[1])"),
        tests=(TERMS,),
    ),
    *_of(
        "operators.py",
        ("mask", "input_grad=of_input in needs_grad", 'input_grad="input" in needs_grad'),
        ("mask", "weight_grad=of_weight in needs_grad", 'weight_grad="linear_weight" in needs_grad'),
        ("index", "zip(terms[::2], terms[1::2]", "zip(terms[1::2], terms[::2]"),
        tests=(TERMS,),
    ),
    *_of(
        "operators.py",
        ("mask", "arguments, may_overwrite=False)", "arguments, may_overwrite=True)"),
        ("index", "results += [new(tokens), new(tokens), valid_count]", "results += [new(tokens), valid_count]"),
        ("mask", "options = replace(options, strategy=strategy)", "pass"),
        tests=(OPERATOR,),
    ),
    *_of(
        "operators.py",
        ("mask", "        torch._C._are_functorch_transforms_active()\n        or ", "        "),
        ("mask", "        or torch._C._len_torch_dispatch_stack() > 0\n", ""),
        ("mask", "        or torch._C._len_torch_function_stack() > 0\n", ""),
        ("mask", "        or torch.jit.is_tracing()\n", ""),
        ("mask", "        or torch.autograd._profiler_enabled()\n", ""),
        ("mask", "return type(tensor) in _PLAIN and not", "return not"),
        ("mask", "tensor.is_meta or tensor.is_neg() or is_wrapper", "tensor.is_neg() or is_wrapper"),
        ("mask", "tensor.is_meta or tensor.is_neg() or is_wrapper", "tensor.is_meta or is_wrapper"),
        ("mask", "tensor.is_meta or tensor.is_neg() or is_wrapper", "tensor.is_meta or tensor.is_neg()"),
        tests=("tests/test_operator.py::test_who_needs_the_operator",),
    ),
    *_of(
        "autograd.py",
        ("index", "range(first + 3, ctx.count, 2)", "range(first + 4, ctx.count + 1, 2)"),
        ("index", "(of_outputs.get(name) for name in DIFFERENTIABLE_OUTPUTS)", "others"),
        tests=(TERMS,),
    ),
    *_of(
        "autograd.py",
        ("mask", "*(tensors if ctx.is_transformed else ())", ""),
        ("mask", "while not tensor.requires_grad and", "while False and"),
        ("mask", "operand.requires_grad and name not in settings.needs_grad", "False"),
        tests=(OPERATOR,),
    ),
    *_of(
        "execution/operands.py",
        ("index", "(*pairs[:2], self.bias, *pairs[2:])", "(*pairs, self.bias)"),
        tests=(TERMS,),
    ),
    *_of(
        "execution/row_kernels/interface.py",
        ("mask", "(column >= 0) & (column <= last)", "column <= last"),
        ("index", "column, last = target - block.start, ", "column, last = target - block.start + 1, "),
    ),
    *_of(
        "execution/row_kernels/torch_rows.py",
        ("mask", "torch.where(is_here, z.gather(", "torch.where(is_here | True, z.gather("),
    ),
    *_of(
        "execution/engine.py",
        ("mask", "is_plain and not region.operands.bias_grad", "is_plain"),
        (
            "index",
            "others = slice(0 if saved is None else saved.rows.stop, rows.count)",
            "others = slice(0, rows.count)",
        ),
        ("index", "column_sums if of_saved is None else column_sums + of_saved[block]", "column_sums"),
        ("index", "else class_weight[block]", "else class_weight[: block.stop - block.start]"),
        tests=(CHUNKS,),
    ),
    *_of(
        "execution/engine.py",
        ("mask", "        next(chunks, None)\n", "        pass\n"),
        (
            "index",
            "steps.logits_(region, buffer.rows(rows)",
            "steps.logits_(region, logits.buffers[0].rows(rows)",
        ),
        tests=(STAGED,),
    ),
    *_of(
        "execution/gradient_accumulation.py",
        ("mask", "        gradient[operands.vocab :] = 0\n", "        pass\n"),
        ("mask", "[: matrix.shape[1]], not self._is_first", "[: matrix.shape[1]], True"),
        ("mask", "weight, accumulate=not self._is_first)", "weight, accumulate=False)"),
        ("index", "of_input[self._rows.of_part(chunk)]", "of_input[: matrix.shape[0]]"),
        ("index", "self._bias[: region.operands.vocab], bias_grad", "self._bias[-region.operands.vocab :], bias_grad"),
        tests=(CHUNKS,),
    ),
    *_of(
        "execution/gradient_accumulation.py",
        ("mask", "term.weight[block], accumulate=block.start > 0", "term.weight[block], accumulate=False"),
        ("index", "memory[tokens - chunk.stop :]", "memory[: chunk.stop]"),
        ("mask", "if has_room and memory is not None else None", "if memory is not None else None"),
        ("index", "weight[block], matrix, x)", "weight[: matrix.shape[1]], matrix, x)"),
        tests=(STAGED,),
    ),
    *_of(
        "execution/gradient_accumulation.py",
        ("mask", "(is_sum and is_small)", "False"),
        tests=(f"{TERMS}::test_a_low_rank_weight_gradient_is_summed_in_float32",),
    ),
    *_of(
        "execution/gradient_accumulation.py",
        ("mask", "self._frequent.begin(weight)", "pass"),
        ("index", "dlogits.gather(1, self._columns.expand(", "dlogits.gather(1, 0 * self._columns.expand("),
        ("mask", "columns, x, accumulate=not is_first)", "columns, x, accumulate=False)"),
        tests=(FREQUENT_ROWS, STAGED),
    ),
    *_of(
        "execution/gradient_accumulation.py",
        ("index", "frequent.add(at, frequent_columns, x)", "frequent.add(0, frequent_columns, x)"),
        (
            "mask",
            "elif self._frequent is not None and _is_in_16_bits(weight):\n",
            "elif self._frequent is not None and at == 0:\n",
        ),
        tests=(TERMS,),
    ),
    *_of(
        "execution/staged_logits.py",
        ("index", "room = (self.vocab - self.width) * self.row_room", "room = self.vocab * self.row_room"),
        (
            "mask",
            "min(self.count - 1, room // max(self.block_elements, 1))",
            "min(self.count, room // self.block_elements)",
        ),
        ("index", "self.vocab * self.row_room - self.borrowed", "self.vocab * self.row_room - 1 - self.borrowed"),
        ("index", "(self.count - self.borrowed - 1)", "(self.count - self.borrowed)"),
        tests=("tests/test_staged_logits.py",),
    ),
    *_of(
        "planning/choose.py",
        ("mask", "return sum_bytes <= blocks.free_elements * itemsize and ", "return "),
        ("mask", " and own_bytes <= logits_bytes(problem, limit)", ""),
        ("mask", "not (has_dx and 2 * blocks.rows", "not (2 * blocks.rows"),
        (
            "sign",
            "return min(candidates, key=lambda candidate: seconds",
            "return max(candidates, key=lambda candidate: seconds",
        ),
        ("sign", "plan = min(plan, one, key", "plan = max(plan, one, key"),
        ("sign", "return min(larger, in_float32,", "return max(larger, in_float32,"),
        ("mask", 'if strategy == "gradients_in_forward" and _needs_later_sums(problem):\n', "if False:\n"),
        tests=(CHOICE, "tests/test_cost.py"),
    ),
    *_of(
        "execution/plan.py",
        ("divisor", "hidden * 4 // itemsize if self.float32_accumulator else hidden", "hidden"),
        ("mask", "settings.keys() & _OWN_FIELDS", "set()"),
        tests=(CHOICE,),
    ),
    *_of(
        "planning/cost.py",
        ("divisor", "sum(step.bytes for step in found.steps) / rates.bandwidth", "0"),
        ("mask", " + parts * rates.part_seconds", ""),
        tests=("tests/test_cost.py",),
    ),
    *_of(
        "execution/steps.py",
        ("sign", '"dW": f"{a}.t() @ {b}"', '"dW": f"-{a}.t() @ {b}"'),
        ("sign", 'f"{words} + {bias}"', 'f"{words} - {bias}"'),
        ("sign", "torch.argmax if region.loss.logit_scale > 0 else", "torch.argmax if True else"),
        ("mask", "region.written_to.write(out, addend, adds=True)", "region.written_to.write(out, addend)"),
        ("index", "bias[columns], weight[columns]", "bias, weight[columns]"),
        tests=(PROGRAM,),
    ),
    *_of(
        "execution/record.py",
        ("sign", '(right, rank + (operator in ("-", "/")))', "(right, rank)"),
        ("divisor", "short if float(short) == value else repr(value)", "short"),
        ("mask", "adds=any(s.adds for s in steps)", "adds=steps[0].adds"),
        ("index", "part.stop - part.start for part", "part.stop - part.start - 1 for part"),
        ("index", "start=slices[start].start,", "start=0,"),
        ("index", "if part is current:", "if part.indices(extent) == current.indices(extent):"),
        tests=(PROGRAM, "tests/test_steps.py"),
    ),
    *_of(
        "execution/record.py",
        ("sign", "self._allocated -= nbytes", "self._allocated += 0 * nbytes"),
        ("mask", "self._allocated + scratch)", "self._allocated)"),
        tests=(RUNS, CHOICE),
    ),
    *_of(
        "execution/row_selection.py",
        ("mask", 'f"scatter({vector}, {fill})" if fill else ', ""),
        ("mask", "None else masked(self.valid, vector, fill)", "None else masked(self.valid, vector, 0)"),
        tests=(PROGRAM,),
    ),
    *_of(
        "execution/engine.py",
        ("mask", "if chunk.start and buffer.padded is saved_logits:", "if chunk.start and saved_logits is not None:"),
        ("mask", "        del logits, dlogits\n", "        pass\n"),
        tests=(RUNS, CHOICE),
    ),
    *_of(
        "execution/engine.py",
        ("mask", "logits.clone() if is_kept else logits", "logits"),
        tests=(SECOND_BACKWARD,),
    ),
    *_of(
        "execution/gradient_accumulation.py",
        ("mask", "                self._rows.scatter_(of_input)\n", "                pass\n"),
        ("mask", "            self._rows.scatter_(self._input)\n", "            pass\n"),
        tests=("tests/test_numerics.py::test_ignored_rows",),
    ),
    *_of(
        "execution/gradient_accumulation.py",
        ("mask", "outs = [None if memory is None else memory[chunk] for", "outs = [None for"),
        tests=("tests/test_rows.py",),
    ),
    *_of(
        "execution/engine.py",
        ("mask", "rows.gather(saved.row_log_sum), fill=largest", "rows.gather(saved.row_log_sum)"),
        tests=("tests/test_rows.py",),
    ),
    *_of(
        "execution/row_selection.py",
        ("index", "reversed(range(0, self.total, _MOVED_ROWS))", "range(0, self.total, _MOVED_ROWS)"),
        ("mask", "        tensor.index_fill_(0, self.order[self.count :], 0)\n", ""),
        ("index", "return self.order[: self.count]", "return self.order[-self.count :]"),
        tests=("tests/test_rows.py",),
    ),
    *_of(
        "operation/loss.py",
        ("sign", "weights - ratio.unsqueeze(-1) * rest.of_targets", "weights + ratio.unsqueeze(-1) * rest.of_targets"),
        ("mask", "library.where(weight < 1, 1 - weight, 0.0)", "1 - weight"),
        ("mask", "library.where(total < _LARGEST_SUM, 1 - total, 1 - _LARGEST_SUM)", "1 - total"),
        ("mask", 'let("p_y", first * library.exp(log_probability))', 'let("p_y", library.exp(log_probability))'),
        tests=("tests/test_target_weights.py",),
    ),
    *_of(
        "execution/row_selection.py",
        ("mask", "scatter(1, order, is_first) & counts", "scatter(1, order, is_first)"),
        tests=("tests/test_target_weights.py",),
    ),
    *_of(
        "execution/host_counts.py",
        ("mask", "        if memory.expired():\n", "        if False:\n"),
        ("index", "return int(count) if known is None else known", "return int(count)"),
        ("mask", "_known[StorageWeakRef(count.untyped_storage())] = value", "pass"),
        tests=("tests/test_rows.py",),
    ),
    *_of(
        "execution/matmul/tuning.py",
        ("mask", " or torch.cuda.is_current_stream_capturing()", ""),
        ("mask", "will_do or torch", "is_rare or torch"),
        ("mask", "_runs[kind] > _MEASURED_RUNS and ", ""),
        ("mask", " and _runs[kind, tokens] <= _OFTEN", ""),
        ("index", "_runs.update([kind, (kind, tokens)])", "_runs.update([kind])"),
        ("index", "_runs.update([kind, (kind, tokens)])", "_runs.update([(kind, tokens)])"),
        ("divisor", "_MEASURED_FACTOR = 2.0**-149", "_MEASURED_FACTOR = 1.0"),
        ("mask", " or torch.are_deterministic_algorithms_enabled()", ""),
        ("mask", 'matmul.accumulate or matmul.kind == "dW"', "matmul.accumulate"),
        ("mask", 'matmul.accumulate or matmul.kind == "dW"', 'matmul.kind == "dW"'),
        ("mask", "for run in tries if run()]", "for run in tries if run() or True]"),
        ("mask", "2 * math.prod(matmul.sizes) < TUNED_OPERATIONS", "False"),
        ("mask", "operations >= TUNED_OPERATIONS and ", ""),
        ("mask", " or not is_hopper(matmul.out.device)", ""),
        ("sign", "key=times.__getitem__)\n    finalists", "key=times.__getitem__, reverse=True)\n    finalists"),
        ("index", "algorithm = runs[index]", "algorithm = runs[0]"),
        ("index", "return -(-tokens // step) * step", "return tokens // step * step"),
        ("divisor", "max(octave // _SIZES_PER_OCTAVE[kind], 1)", "octave"),
        ("index", "max(known / tokens, tokens / known)", "abs(tokens)"),
        ("index", "(matmul.kind, *sizes, *signature[:3], a.", "(matmul.kind, *sizes, a."),
        ("index", ", signature.has_bias, adds)", ", adds)"),
        ("index", ", signature.has_bias, adds)", ", signature.has_bias)"),
        ("mask", 'matmul.kind == "logits" and matmul.accumulate\n', "matmul.accumulate\n"),
        ("index", '"dW": 2}', '"dW": 0}'),
        ("index", "min(finalists, key=totals.__getitem__)", "min(finalists, key=times.__getitem__)"),
        ("divisor", "totals[0] / totals[winner]", "totals[winner] / totals[0]"),
        ("divisor", "math.ceil(_BURST_SECONDS / times[index])) / 2", "math.ceil(_BURST_SECONDS / times[index]))"),
        tests=("tests/test_tuning.py",),
    ),
    *_of(
        "execution/matmul/tuning.py",
        ("mask", " and is_hopper(None)", ""),
        tests=("tests/test_matmul.py",),
    ),
    *_of(
        "execution/matmul/layout.py",
        ("mask", "        if matrix.data_ptr() % ALIGNED_BYTES:\n", "        if False:\n"),
        ("mask", " and stride >= columns", ""),
        ("index", "= columns, rows, last_stride, stride", "= rows, columns, last_stride, stride"),
        tests=("tests/test_tuning.py",),
    ),
    *_of(
        "execution/engine.py",
        ("mask", "return torch.where(valid_count == 0, 0, grad)", "return grad"),
        tests=("tests/test_numerics.py::test_gradient_of_nothing_is_zero_whatever_comes_in",),
    ),
    *_of(
        "execution/row_selection.py",
        ("sign", "torch.argsort(valid, descending=True, stable=True)", "torch.argsort(valid, stable=True)"),
        ("divisor", ".sum(1)\n        self._host_waits", ".sum(1) + 1\n        self._host_waits"),
        ("mask", "return vector if self.valid is None else masked(", "return vector if True else masked("),
        ("mask", "_in_any(target != region.loss.ignore_index)", "_in_any(target >= 0)"),
        ("mask", "vector.new_full((self.total,), fill)", "vector.new_full((self.total,), 1)"),
        ("index", "0, self.index[chunk], out=out)", "0, self.index[: len(self.index[chunk])], out=out)"),
        (
            "index",
            "yield slice(start, min(start + rows, self.count))",
            "yield slice(start, min(start + rows + 1, self.count))",
        ),
    ),
    *_of(
        "execution/row_selection.py",
        ("mask", "target.clamp(0, region.operands.whole_vocab - 1)", "target.clamp(0, region.operands.whole_vocab)"),
        (
            "mask",
            "target.clamp(0, region.operands.whole_vocab - 1)",
            "target.clamp(max=region.operands.whole_vocab - 1)",
        ),
        tests=("tests/test_numerics.py::test_target_out_of_range",),
    ),
    *_of(
        "execution/matmul/matmul.py",
        (
            "sign",
            "weight_gradient_(total, dlogits, x, accumulate=number > 0,",
            "weight_gradient_(total, -dlogits, x, accumulate=number > 0,",
        ),
        ("divisor", "torch.addmm(bias, a, b, out=out)", "torch.addmm(bias, a, b, beta=0.5, out=out)"),
        ("mask", "        out.add_(bias)\n", "        pass\n"),
        ("mask", "accumulate=number > 0", "accumulate=False"),
        (
            "index",
            "weight_gradient_(total, dlogits, x,",
            "weight_gradient_(total, dlogits.roll(1, 1), x,",
        ),
    ),
    *_of(
        "planning/choose.py",
        ("mask", "if budget is None or temporary_bytes(problem, plan) <= budget:", "if True:"),
        ("mask", "is_better = wide.block_columns > narrow.block_columns and", "is_better ="),
        ("mask", "return wide if is_better else narrow", "return narrow"),
        ("sign", "budget - beside - rounded_up", "budget - rounded_up"),
        tests=(BUDGET, "tests/test_plan.py::test_blocks_fill_the_budget"),
    ),
    *_of(
        "execution/matmul/invariant.py",
        ("index", "-(-hidden // ROW_MULTIPLE) * ROW_MULTIPLE)", "hidden)"),
        ("index", "of_out.copy_(out[rows])", "of_out.copy_(out[:1])"),
        ("mask", "            out[rows] = of_out\n", "            pass\n"),
        tests=(BATCH_INVARIANT,),
    ),
    *_of(
        "execution/steps.py",
        ("mask", 'region.plan.batch_invariant and kind == "logits"', "False"),
        ("mask", "region.plan.batch_invariant and not region.is_cuda", "False"),
        (
            "mask",
            "                for rows in _rows_at_a_time(region, buffer)",
            "                for rows in [EVERYTHING]",
        ),
        tests=(BATCH_INVARIANT,),
    ),
    *_of(
        "execution/distillation.py",
        ("mask", "batch_invariant=plan.batch_invariant", "batch_invariant=False"),
        ("mask", "            compute(*compared, factors=of_chunk, out=dlogits)", "            pass"),
        tests=(f"{BATCH_INVARIANT}::test_divergences",),
    ),
    *_of(
        "execution/engine.py",
        ("mask", "return in_place and is_plain and", "return is_plain and"),
        tests=("tests/test_steps.py::test_a_bias_or_more_than_statistics_takes_two_passes",),
    ),
    *_of(
        "execution/engine.py",
        ("mask", "region.shard is None and not region.plan.batch_invariant", "region.shard is None"),
        tests=(BATCH_INVARIANT,),
    ),
    *_of(
        "execution/matmul/matmul.py",
        ("index", "range(0, main, step)]", "range(0, step, step)]"),
        tests=("tests/test_numerics.py::test_float32_logits_lose_nothing",),
    ),
    *_of(
        "execution/matmul/matmul.py",
        (
            "index",
            "return matrix.contiguous() if is_strided_vector else matrix",
            "return matrix",
        ),
        tests=("tests/test_numerics.py::test_chunks_of_one_row_of_a_transposed_input",),
    ),
    *_of(
        "execution/matmul/matmul.py",
        ("mask", ".t(), of_bias, accumulate)", ".t(), of_bias, False)"),
        ("index", "is_wider else _rows(bias, block)", "is_wider else bias"),
        ("mask", "accumulate=accumulate or block.start > 0)", "accumulate=accumulate)"),
        ("mask", "out.to(dtype) if accumulate or dtype == out.dtype else ", ""),
        ("mask", 'is_sum = self.parts > 1 or (self.kind == "dX" and self.tail > 0)', "is_sum = self.parts > 1"),
        ("mask", "return [*blocks, slice(main, self.columns)] if main < self.columns else blocks", "return blocks"),
        ("mask", "    if accumulate and bias is not None:\n", "    if False:\n"),
        ("divisor", "% ROW_MULTIPLE if has_tail else 0", "% (2 * ROW_MULTIPLE) if has_tail else 0"),
        ("mask", " and self.columns > ROW_MULTIPLE\n", "\n"),
        ("divisor", "(m * k + k * block) * self.sum_dtype.itemsize", "(m * k + k * block) * self.dtype.itemsize"),
        ("index", 'block = min(n, _FLOAT32_COLUMNS) if self.kind == "logits" else n', "block = n"),
        ("mask", "block = 0 if is_tuned else ", "block = "),
        tests=("tests/test_matmul.py",),
    ),
    *_of(
        "execution/compile_times.py",
        ("mask", "    if kind not in first_runs:\n", "    if True:\n"),
        tests=("tests/test_explain.py",),
    ),
    *_of(
        "execution/gradient_scaling.py",
        ("sign", "source.float().mul_(factor)", "source.float().mul_(-factor)"),
        ("divisor", "torch.mul(gradient, factor.to(gradient.dtype), out=out)", "torch.div(gradient, factor, out=out)"),
        ("mask", "and factor == 1 and may_overwrite", "and may_overwrite"),
        (
            "index",
            "out.view(-1).split(_FLOAT32_BLOCK), strict=True",
            "out.view(-1)[:_FLOAT32_BLOCK].flip(0).split(_FLOAT32_BLOCK), strict=True",
        ),
        tests=(SCALING,),
    ),
    *_of(
        "execution/gradient_scaling.py",
        ("mask", "if may_overwrite else torch.empty_like(gradient, ", "if True else torch.empty_like(gradient, "),
        tests=(SECOND_BACKWARD, SCALING),
    ),
    *_of(
        "operation/loss.py",
        ("sign", "1 - (u / self.softcap) ** 2", "1 + (u / self.softcap) ** 2"),
        ("divisor", "tanh(z * (self.scale / self.softcap))", "tanh(z * self.scale)"),
        tests=(ROW_KERNELS,),
    ),
    *_of(
        "execution/row_kernels/torch_rows.py",
        ("sign", "gradient.sub_(uniform if class_weight", "gradient.add_(uniform if class_weight"),
        (
            "sign",
            "probability * factor - one_hot)",
            "probability * factor + one_hot)",
        ),
        (
            "sign",
            "_finite(shifted).mul_(probability).mul_(coefficients.entropy)",
            "_finite(shifted).mul_(probability).mul_(-coefficients.entropy)",
        ),
        ("divisor", "else gradient.mul_(slope)", "else gradient"),
        ("divisor", "uniform if class_weight is None else uniform * class_weight", "uniform"),
        ("divisor", "weight = 1.0 if class_weight is None else class_weight", "weight = 1.0"),
        ("index", "out=sums[name][rows]", "out=sums[name][: shifted.shape[0]]"),
        (
            "index",
            "column = logits.max(1)",
            "column = logits[:, 1:].max(1)",
        ),
        ("mask", "and self.logit_map.softcap is None else None", "else None"),
    ),
    *_of(
        "execution/row_kernels/torch_rows.py",
        ("sign", "torch.sub(whole, row_max[rows, None], out=whole)", "torch.add(whole, row_max[rows, None])"),
        ("divisor", "(coefficients.probability[rows] / (1 + others[rows]))", "coefficients.probability[rows]"),
        ("divisor", "                gradient.mul_(slope)\n", "                pass\n"),
        ("index", "torch.where(is_here, entry,", "torch.where(~is_here, entry,"),
        ("index", "gradient.scatter_(1, at, own).mul_(", "gradient.mul_("),
        ("index", "z.gather(1, column[:, None])", "z.gather(1, 0 * column[:, None])"),
        ("mask", "of_block.data_ptr() != z[rows].data_ptr()", "of_block.dtype != z.dtype"),
        tests=(ONE_PASS,),
    ),
    *_of(
        "execution/row_kernels/torch_rows.py",
        ("index", "sums.add_(gradient.sum(0))", "sums.copy_(gradient.sum(0))"),
        tests=("tests/test_numerics.py::test_more_logits_than_one_block_of_rows",),
    ),
    *_of(
        "execution/row_kernels/torch_rows.py",
        ("mask", "shifted.clamp(min=torch.finfo(shifted.dtype).min)", "shifted.clone()"),
        tests=(SPECIAL,),
    ),
    *_of(
        "graph/unfused_cross_entropy/rules.py",
        ("sign", "_share(call) * (log_sum_exp - call.logits)", "_share(call) * (log_sum_exp + call.logits)"),
        ("sign", "keepdim=True) - share) * grad", "keepdim=True) + share) * grad"),
        ("divisor", "loss = loss / rows if", "loss = loss if"),
        ("divisor", "grad = grad / (call.logits.numel // call.logits.shape[classes])", "pass"),
        ("divisor", "grad * (call.label_smoothing - 1)", "grad * -1"),
        ("mask", "slope if call.weight is None else slope * _along_classes(call)", "slope"),
        ("mask", "share if call.weight is None else share * _along_classes(call)", "share"),
        tests=(ALONE,),
    ),
    *_of(
        "graph/matching/losses.py",
        ("index", "return min(1, self.logits.ndim - 1)", "return self.logits.ndim - 1"),
        tests=(ALONE,),
    ),
    *_of(
        "graph/decomposition.py",
        ("sign", "shifted = logits - row_max", "shifted = row_max - logits"),
        (
            "divisor",
            "terms = [(of_rows, divisor)]",
            "terms = [(of_rows, count)]",
        ),
        ("divisor", 'ltorch.where(ltorch.eq(num_items, 0), float("inf"), num_items)', "num_items"),
        ("mask", "[(ltorch.where(valid, term, 0.0), divisor) for", "[(term, divisor) for"),
        ("mask", "result if output.ignored is None else ltorch.where(valid, result, output.ignored)", "result"),
        ("index", "z = z[:, : loss.vocab_size]", "z = z[:, -loss.vocab_size :]"),
        ("index", "weight = weight[:columns]", "weight = weight[-columns:]"),
        ("index", "column = ltorch.where(valid, target, 0)", "column = ltorch.where(valid, 0, 0)"),
        tests=(f"{TRACED}_with_everything", f"{TRACED}[cpu-through_decomposition]"),
    ),
    *_of(
        "operation/moments.py",
        ("sign", "return probability * shifted", "return -probability * shifted"),
        ("sign", "return shifted\n", "return -shifted\n"),
        ("divisor", "return shifted * weight", "return shifted"),
        ("index", "return probability * probability", "return probability"),
        ("mask", "Moment(_shifted_sum, keeps_infinity=True)", "Moment(_shifted_sum)"),
        ("mask", "is_weighted=True, keeps_infinity=True", "keeps_infinity=True"),
        tests=(ROW_KERNELS, PLANS, SPECIAL),
    ),
    *_of(
        "execution/row_kernels/nvfuser_rows.py",
        ("sign", 'near_one, gradient - given["one_hot"]', 'near_one, gradient + given["one_hot"]'),
        ("mask", 'p.apply("gt", 0.5)', 'p.apply("gt", 2.0)'),
        ("mask", 'total.apply("lt", 1.5)', 'total.apply("lt", 1.0)'),
        ("sign", "gradient * (1.0 - tanh * tanh)", "gradient * (1.0 + tanh * tanh)"),
        ("sign", "gradient - p * _finite(shifted)", "gradient + p * _finite(shifted)"),
        ("sign", "gradient - (uniform if", "gradient + (uniform if"),
        ("sign", "self._operand(other)) - self", "self._operand(other)) * -1.0 + self"),
        ("sign", "math.copysign(math.inf, -self.logit_map.scale)", "-math.inf"),
        ("divisor", 'gradient = p * given["probability"]', "gradient = p"),
        ("divisor", "uniform if weight is None else uniform * weight", "uniform"),
        ("divisor", '(part_sum * shifted.apply("exp")).apply', "part_sum.apply"),
        ("divisor", "(u * (scale / softcap))", "(u * scale)"),
        ("mask", "if moment.keeps_infinity else _finite(shifted)", "if True else _finite(shifted)"),
        ("mask", 'part_max.apply("eq", -math.inf).apply("where", 0.0, part_max)', "part_max"),
        ("mask", "term = build.masked(term, layout.vocab, (layout.row_stride,), 0.0)", "pass"),
        ("mask", "torch.where(is_here, entry, block.padded.gather(1, column))", "entry"),
        ("mask", "z = torch.where(is_here, block.padded.gather(1, column), z)", "pass"),
        ("mask", "(logit_map.softcap is not None or logit_map.scale == 0)", "False"),
        (
            "index",
            "self.fd.define_scalar(vocab, DataType.Int))\n        return",
            "self.fd.define_scalar(vocab - 1, DataType.Int))\n        return",
        ),
        ("index", "length = math.prod(shape[dim + 1 :])", "length = 1"),
        ("index", "outputs[0][: buffer.layout.vocab]", "outputs[0][-buffer.layout.vocab :]"),
        ("index", "1 if inputs[0].shape[0] == 1 else -1", "-1"),
        tests=(ROW_KERNELS, NVFUSER),
    ),
    *_of(
        "execution/row_kernels/dispatch.py",
        ("mask", 'name == "torch" or (device_type == "cuda" and', 'name == "torch" or ('),
        ("index", "name for name in FASTEST if", "name for name in reversed(FASTEST) if"),
        ("divisor", "reads = 4 / 3 if", "reads = 3 / 4 if"),
        tests=(ROW_KERNELS,),
    ),
    *_of(
        "execution/row_kernels/triton_rows.py",
        ("sign", "near_one, gradient - one_hot)", "near_one, gradient + one_hot)"),
        ("mask", "tl.where(p > 0.5, near_one", "tl.where(p > 2.0, near_one"),
        ("mask", "if others < 0.5:", "if others < -2.0:"),
        ("mask", "exponential < 0.75", "exponential < 2.0"),
        ("index", "group * WIDTH + number % WIDTH", "number % WIDTH"),
        ("divisor", "1.0 + part_sum, largest", "part_sum, largest"),
        ("sign", "gradient -= p * _finite(shifted) * entropy", "gradient += p * _finite(shifted) * entropy"),
        ("sign", "gradient -= uniform if weight", "gradient += uniform if weight"),
        ("divisor", "gradient -= uniform if weight is None else uniform * weight", "gradient -= uniform"),
        ("divisor", "uniform=coefficients.uniform * class_weight", "uniform=coefficients.uniform"),
        ("mask", "shifted if KEEP_INFINITY[i] else _finite(shifted)", "shifted"),
        ("mask", "tl.where(is_column, term, 0.0)", "term"),
        ("index", "moments + i * tl.num_programs(0) + index", "moments + index * len(TERMS) + i"),
        ("sign", "gradient *= 1 - tanh * tanh", "gradient *= 1 + tanh * tanh"),
        ("sign", "_exp(maxima - _shift(largest), IS_EXACT)", "_exp(maxima + _shift(largest), IS_EXACT)"),
        ("divisor", "2 * SCALE / SOFTCAP * _LOG2_E", "2 * SCALE * _LOG2_E"),
        ("divisor", "group_sum * _exp(group_max - shift, IS_EXACT) + block_sum", "group_sum + block_sum"),
        ("mask", "tl.where(rest_columns < vocab, _logits(rest,", "tl.where(rest_columns >= 0, _logits(rest,"),
        ("mask", "shift = _shift(new_max)", "shift = new_max"),
        ("mask", 'tl.where(is_part, part_max, float("-inf"))', "part_max"),
        ("mask", "_exp(maxima - _shift(largest), IS_EXACT)", "_exp(maxima - largest, IS_EXACT)"),
        (
            "mask",
            "tl.store(row_max + index, largest, mask=part == 0)",
            "tl.store(row_max + index, largest, mask=part == 1)",
        ),
        ("mask", "(offset >= 0) & (offset < vocab)", "offset >= 0"),
        ("index", "(vocab // BLOCK - 1 - count) * BLOCK", "(vocab // BLOCK - 1 - count) * 0"),
        ("index", "tl.store(row + offset, gradient.to(at_target", "tl.store(row, gradient.to(at_target"),
        ("index", "first = part % PARTS_EACH * PART", "first = part % PARTS_EACH * BLOCK"),
        ("index", "start = vocab_block * WIDTH + first", "start = first"),
        ("index", "((vocab_block - BORROWED).to(tl.int64)", "(vocab_block.to(tl.int64)"),
        ("index", "row_stride = tl.where(is_last, STRIDE, WIDTH)", "row_stride = STRIDE"),
        ("index", "exchange + 1 + index * SLOTS", "exchange + index * SLOTS"),
        ("index", "(VOCAB_BLOCKS - 1) * WIDTH, WIDTH) - first, PART)", "(VOCAB_BLOCKS - 1) * WIDTH, WIDTH), PART)"),
        (
            "index",
            "tl.store(row_max + index, largest)\n    tl.store(row_log_sum",
            "tl.store(row_log_sum",
        ),
        ("mask", "is_row = index < rows\n        offsets", "is_row = index >= 0\n        offsets"),
        ("index", "first = group * rows_each", "first = 0 * rows_each"),
        ("index", "column_sums + group * VOCAB + columns", "column_sums + group * STRIDE + columns"),
        ("divisor", "else sums.sum(0)", "else sums.mean(0)"),
        tests=TRITON_ROWS,
    ),
    *_of(
        "execution/gradient_scaling.py",
        ("sign", "(old.to(tl.float32) * value)", "(old.to(tl.float32) * -value)"),
        ("mask", "if value != 1.0:", "if value == 1.0:"),
        ("mask", "mask = offsets < size\n", "mask = offsets <= size\n"),
        ("index", "start = tl.program_id(0).to(tl.int64) * BLOCK", "start = tl.program_id(0).to(tl.int64) * 2 * BLOCK"),
        ("index", "for block in range(start, size, step):", "for block in range(start, size, 2 * step):"),
        tests=("tests/test_triton_rows.py::test_in_the_interpreter",),
    ),
    *_of(
        "execution/row_kernels/triton_rows.py",
        ("index", "tl.debug_barrier()", "pass"),
        ("index", 'tl.atomic_xchg(slots + part, packed, sem="relaxed")', "pass"),
        ("index", 'tl.atomic_add(exchange, 1, sem="relaxed").to(tl.int32)', "tl.program_id(0)"),
        tests=("tests/test_triton_rows.py::test_compiled_statistics_and_gradient",),
    ),
    *_of(
        "execution/row_kernels/triton_rows.py",
        ("mask", "if blocks * each > _parts_at_a_time(device):", "if False:"),
        ("divisor", "by_registers = ", "by_registers = 2 * "),
        tests=(
            "tests/test_triton_rows.py::test_rows_are_divided_only_where_their_parts_run_at_a_time",
            "tests/test_triton_rows.py::test_how_many_programs_run_at_a_time",
        ),
    ),
    *_of(
        "graph/matching/readings.py",
        ("sign", 'return "log_prob" if of_label == -of_log_sum != 0 else ""', 'return "log_prob" if of_label else ""'),
        ("sign", "signs=(1, -1)", "signs=(1, 1)"),
        ("mask", " or index.derives_from(labels, paths[0].tensor)", ""),
        ("mask", "if labels.numel * path.vocab != logits.numel or", "if"),
        ("index", "return reading and replace(reading, wraps_labels=True)", "return reading"),
        ("mask", "(a.scale, a.softcap) == (b.scale, b.softcap)", "True"),
        ("mask", "if any(index.users(reading.tensor) != [bsym] for reading in ends):", "if False:"),
        ("mask", "id(user) not in passed and not _is_log_softmax(user, reading.tensor)", "id(user) not in passed"),
        ("index", "(number, *rest)", "(0, *rest)"),
        ("mask", "return smallest == torch.finfo(dtypes.to_torch_dtype(bsym.output.dtype)).min", "return True"),
        ("mask", " or not isinstance(smallest, float)", ""),
        ("mask", "and not any(index.may_share_memory(producer.output, each) for each in written)", ""),
        ("index", 'ways.sort(key=lambda way: way[-1].normalised == "softmax")', "pass"),
        ("mask", "len(others) != 1 or not is_same_logits(ways[0][-1], ways[1][-1])", "len(others) != 1"),
        ("index", "if names == others and (is_last", "if (is_last"),
        ("index", "return is_same_logits(a, b) and a.shift == b.shift", "return is_same_logits(a, b)"),
        ("mask", "if self.paths and self.path.shift and sum(self.coefficients):", "if False:"),
        ("sign", "return _Product(-1, (producer,)", "return _Product(1, (producer,)"),
        ("index", "shape == [count if at == dimension else 1 for at in range(rows)]", "True"),
        ("index", "return rows == 1 and part == list(range(count))", "return rows == 1"),
        ("mask", 'path.normalised != "log_softmax" or index.derives_from(picked', "index.derives_from(picked"),
        ("mask", 'path.normalised != "log_softmax" or index.derives_from(picked, paths[0].tensor):', "False:"),
        (
            "mask",
            "return None if is_unknown and not _is_normalised(tensor, dimension, index) else reading",
            "return reading",
        ),
        ("mask", "and has_classes and not index.derives_from(mask, paths[0].tensor):", "and has_classes:"),
        ("mask", "and has_classes and not index", "and not index"),
        ("mask", "if any(other.paths and is_same_logits(", "if any(False and is_same_logits("),
        tests=("tests/test_readings.py", "tests/test_patterns.py"),
    ),
    *_of(
        "graph/matching/match.py",
        ("mask", "if id(user) not in passed and id(user) not in owners:", "if False:"),
        ("mask", "is_cheap = theirs.path.carries_grad or", "is_cheap = True or"),
        ("mask", "needed.__getitem__", "lambda each: ()"),
        ("mask", "if any(index.may_share_memory(labels, tensor) for", "if any(False for"),
        ("index", "return [*(found or parts), self.bsym]", "return [*found, self.bsym]"),
        ("mask", " or self.index.writers_between([result.bsym], weighted.place):", ":"),
        tests=("tests/test_readings.py", "tests/test_patterns.py"),
    ),
    *_of(
        "graph/rewrite.py",
        ("sign", "value = ltorch.neg(value)", "pass"),
        ("mask", "if carries_grad(value) and not carries_grad(result.tensor):", "if False:"),
        tests=("tests/test_readings.py", "tests/test_patterns.py"),
    ),
    *_of(
        "execution/row_loss.py",
        (
            "mask",
            "rows.mask_ignored(rows.gather(operands.token_weights))",
            "rows.gather(operands.token_weights)",
        ),
        ("divisor", "else row_weights.at_target * token_weights", "else row_weights.at_target"),
        ("mask", "grad if scales.token_weights is None else grad * scales.token_weights", "grad"),
        ("mask", "value if scales.token_weights is None else value * scales.token_weights", "value"),
        tests=("tests/test_token_weights.py",),
    ),
    *_of(
        "execution/row_loss.py",
        ("mask", "torch.where(s == 0, 0.0, s * derivative)", "s * derivative"),
        ("sign", "vectors[0] = vectors[1] = -g_p", "vectors[0] = vectors[1] = g_p"),
        ("sign", "vectors[0] = vectors[0] + g_l", "vectors[0] = vectors[0] - g_l"),
        (
            "index",
            "[vector[chunk] for vector in scales.token_inputs]",
            "[vector[: chunk.stop - chunk.start] for vector in scales.token_inputs]",
        ),
        ("mask", "rows.gather(vector))\n            for number", "vector)\n            for number"),
        tests=(
            "tests/test_token_loss.py::test_the_region",
            "tests/test_token_loss.py::test_infinite_derivatives_of_tokens_that_do_not_count",
            "tests/test_token_loss.py::test_any_function",
        ),
    ),
    *_of(
        "operation/token_loss.py",
        ("sign", "_plus(d[0], _times(d[1], -1.0))", "_plus(d[0], d[1])"),
        ("divisor", "_of_one(lambda f, out, x: 0.5 / out)", "_of_one(lambda f, out, x: 1.0 / out)"),
        ("mask", "_of_smaller(f, out, *a, *d[::-1])", "_of_smaller(f, out, *a, *d)"),
        ("mask", "_plus(d_a, d_b) * 0.5, _chosen(f, out, a < b, d_a, d_b))", "d_b, _chosen(f, out, a < b, d_a, d_b))"),
        ("mask", "if name in self._differentiable else name", "if False else name"),
        tests=("tests/test_token_loss.py::test_derivatives",),
    ),
    *_of(
        "graph/rules.py",
        ("mask", "on_cpu and any(map(carries_grad, scalars))", "False"),
        ("index", 'register_method("mod", ltorch.remainder)', "pass"),
        ("index", "int(input.ndim not in (0, 1, 3)) if dim is None else dim", "0 if dim is None else dim"),
        tests=("tests/test_thunder.py::test_what_thunder_lacks",),
    ),
    *_of(
        "graph/thunder_private.py",
        ("index", '"default_device": torch.get_default_device()', '"device": None'),
        tests=("tests/test_thunder.py::test_what_thunder_lacks",),
    ),
    *_of(
        "operation/token_loss.py",
        ("mask", "operation in _OF_FRACTIONS or self._promoted(promoted).is_floating_point", "False"),
        ("mask", "operation in _OF_FRACTIONS or ", ""),
        ("index", 'return self._append("where", (name, 1, 0))', "return name"),
        ("mask", "if dtype is not self.dtype(name):", "if False:"),
        ("index", 'arguments[:1] if operation == "float" else arguments', "arguments"),
        tests=("tests/test_token_loss.py::test_dtypes_of_inputs", "tests/test_token_loss.py::test_what_has_no_meaning"),
    ),
    *_of(
        "graph/matching/token_losses.py",
        (
            "index",
            "cast(argument(bsym.flat_proxy_args[0])",
            "cast(self._tokens.get(bsym.flat_proxy_args[0].name, 'i0')",
        ),
        tests=("tests/test_token_loss.py::test_dtypes_in_programs",),
    ),
    *_of(
        "operators.py",
        ("mask", "row_dtype if vector.is_floating_point() else vector.dtype", "row_dtype"),
        tests=("tests/test_token_loss.py::test_large_integers",),
    ),
    *_of(
        "dtensor.py",
        ("mask", 'check_token_inputs(arguments["token_inputs"])', "pass"),
        tests=(f"{PARALLEL}::test_what_one_rank_refuses_raises_on_all_of_them",),
    ),
    *_of(
        "graph/matching/logits_path.py",
        ("mask", "    ltorch.log.id: _log,\n", ""),
        tests=("tests/test_readings.py::test_regions",),
    ),
    *_of(
        "graph/matching/logits_path.py",
        ("index", "if not is_in_one_dtype or tuple(total.shape) != path.kept_shape:", "if not is_in_one_dtype:"),
        ("mask", "if carries_grad(bsym.output) and not (path.carries_grad and all", "if False and (all"),
        ("mask", 'if paths[-1].normalised == "exp":', "if False:"),
        ("mask", " or again.args[0].name != own.args[0].name:", ":"),
        ("mask", "if producer.args[0].name != exponentials.name:", "if False:"),
        tests=("tests/test_readings.py::test_what_looks_like_a_reading",),
    ),
    *_of(
        "graph/dynamo/writing.py",
        ("index", 'if out.ndim or not region["target"].ndim:', "if out.ndim:"),
        tests=("tests/test_readings.py::test_one_row_of_logits",),
    ),
    *_of(
        "graph/rules.py",
        ("mask", "checker=lambda *shape, **settings: not shape", "checker=lambda *shape, **settings: False"),
        tests=("tests/test_thunder.py::test_an_output_without_the_loss",),
    ),
    *_of(
        "vocab_parallel.py",
        ("mask", " and not parallel.divides_tokens:", ":"),
        tests=(f"{PARALLEL}::test_what_is_equal_where_each_call_is_compared",),
    ),
    *_of(
        "graph/trace_printer.py",
        ("mask", "    with on_values():\n", "    if True:\n"),
        tests=("tests/test_steps.py::test_where_dynamo_has_switched_subclasses_off",),
    ),
    *_of(
        "planning/program.py",
        ("mask", "@on_values()\n", ""),
        tests=("tests/test_steps.py::test_where_dynamo_has_switched_subclasses_off",),
    ),
    *_of(
        "loss_nodes.py",
        ("mask", "is_row or ", ""),
        tests=("tests/test_readings.py::test_entropy_of_a_single_row",),
    ),
    *_of(
        "loss_nodes.py",
        ("index", "isinstance(part, range | list) or", "isinstance(part, list) or"),
        tests=(f"{BACKEND}::test_rows_counted_by_python",),
    ),
    *_of(
        "loss_nodes.py",
        ("mask", "(is_row or _multiplies_rows(operand, sizes))", "True"),
        ("mask", '("truediv", "exp")', '("truediv", "")'),
        ("mask", 'if name == "kl_div":', "if False:"),
        tests=(
            f"{BACKEND}::test_a_graph_without_a_loss_needs_no_thunder",
            f"{BACKEND}::test_fused",
            f"{BACKEND}::test_not_fused",
        ),
    ),
    *_of(
        "modules.py",
        ("mask", "if (linear._forward_hooks or linear._forward_pre_hooks) and", "if False and"),
        ("mask", 'or "forward" in linear.__dict__', ""),
        tests=("tests/test_modules.py",),
    ),
    *_of(
        "graph/thunderfx.py",
        ("index", 'for name in ("input", "other", "target") if', "for name in () if"),
        tests=("tests/test_fx.py::test_tensors_by_keyword",),
    ),
    *_of(
        "graph/matching/readings.py",
        ("mask", "if _reduces_classes(bsym, path):", "if True:"),
        ("mask", "(ltorch.exp.id, ltorch.log.id), (ltorch.add.id", "(ltorch.exp.id,), (ltorch.add.id"),
        ("mask", "(ltorch.add.id, ltorch.clamp.id)", "()"),
        tests=("tests/test_patterns.py", "tests/test_readings.py::test_entropies_in_one_sum"),
    ),
    *_of(
        "token_functions.py",
        ("mask", "operand.python_type() is _Numbers", "False"),
        tests=("tests/test_token_loss.py::test_dtypes_in_programs",),
    ),
    *_of(
        "graph/matching/token_losses.py",
        ("mask", "if not has_grad:\n            raise NotASum", "if False:\n            raise NotASum"),
        ("mask", "if has_grad and tensor.name in self._index.need_grad:", "if False:"),
        (
            "mask",
            "elif not all(arg.name in self._sums or arg.name in self._tokens for arg in operands):",
            "elif False:",
        ),
        ("mask", "all(id(user) in self._passed | self._own or not self._passes_grad(user) for user in users)", "True"),
        ("mask", "if is_alone and all(isinstance(weight, TensorProxy)", "if all(isinstance(weight, TensorProxy)"),
        ("mask", "are_steps and len(dependent) == 1", "False"),
        ("sign", 'self._writer.write("neg", (name,), {}) if source.factor == -1 else name', "name"),
        tests=(
            "tests/test_token_loss.py::test_programs",
            "tests/test_token_loss.py::test_gradients_that_wait",
            "tests/test_token_loss.py::test_masked_tokens_are_left_out",
        ),
    ),
    *_of(
        "token_functions.py",
        ("mask", " or self._is_shared or", " or"),
        ("mask", "step.is_detached and isinstance", "False and isinstance"),
        tests=("tests/test_token_loss.py::test_derivatives", "tests/test_token_loss.py::test_what_has_no_meaning"),
    ),
    *_of(
        "operation/loss.py",
        ("mask", "self.z_loss or self.moments or self.needs_argmax", "self.moments or self.needs_argmax"),
        tests=("tests/test_numerics.py::test_z_loss",),
    ),
    *_of(
        "operators.py",
        ("index", "tokens *= parallel.process_group.size() if parallel.sequence_parallel else 1", "pass"),
        tests=(f"{PARALLEL}::test_sizes_that_a_compiler_is_told",),
    ),
    *_of(
        "graph/token_functions.py",
        ("mask", "known[bsym.args[0].name] = name", "pass"),
        ("mask", "if carries_grad(out) else writer.detached(name)", ""),
        tests=("tests/test_token_loss.py::test_compiled_programs",),
    ),
    *_of(
        "graph/matching/match.py",
        ("mask", "(found is None or not found.is_zero_without_loss)", "found is None"),
        ("mask", ", *self.place.flat_proxy_args)", ")"),
        tests=("tests/test_token_loss.py::test_programs", "tests/test_token_loss.py::test_two_heads"),
    ),
    *_of(
        "execution/row_selection.py",
        ("mask", "valid & (token_weights != 0)", "valid"),
        tests=("tests/test_token_weights.py",),
    ),
    *_of(
        "execution/row_selection.py",
        ("mask", "torch.where(counts, rows.mask_ignored(rows.gather(weights)), 0)", "rows.gather(weights)"),
        ("index", "of_targets.any(1)", "of_targets[:, 0]"),
        ("mask", "torch.where(valid if tensor.ndim == 1 else valid.unsqueeze(-1), tensor, fill)", "tensor"),
        tests=("tests/test_target_weights.py",),
    ),
    *_of(
        "execution/steps.py",
        ("index", "column.shape[1], _summed_by_column(column, one_hot)", "column.shape[1], one_hot"),
        ("mask", "z = torch.where(is_here, here, z)", "z = here"),
        ("index", "(vector.repeat_interleave(count) for", "(vector.repeat(count) for"),
        tests=("tests/test_target_weights.py",),
    ),
    *_of(
        "operation/loss.py",
        ("divisor", "upstream * target_weights.sum(-1), ", "upstream, "),
        tests=("tests/test_target_weights.py",),
    ),
    *_of(
        "operation/divergence.py",
        ("index", "(math.log1p(-self.beta), math.log(self.beta))", "(math.log(self.beta), math.log1p(-self.beta))"),
        ("index", '"reverse": 0.0}.get(self.kind, self.beta)', '"reverse": 0.0}.get(self.kind, 1 - self.beta)'),
        tests=("tests/test_kl_divergence.py",),
    ),
    *_of(
        "execution/row_kernels/torch_divergence.py",
        ("index", "8 * student.layout.vocab", "student.layout.vocab"),
        tests=(f"{BATCH_INVARIANT}::test_divergences",),
    ),
    *_of(
        "execution/row_kernels/torch_divergence.py",
        ("sign", "gradient = p.sub_(q) if", "gradient = q.sub_(p) if"),
        ("divisor", "factors[rows, None] / divergence.temperature", "factors[rows, None]"),
        ("mask", "of_student.sub_(mean[:, None])", "pass"),
        tests=("tests/test_kl_divergence.py",),
    ),
    *_of(
        "execution/row_kernels/triton_divergence.py",
        ("sign", "((p - q) * factor)", "((q - p) * factor)"),
        ("divisor", "tl.load(factors + index) * SCALE", "tl.load(factors + index)"),
        (
            "mask",
            "tl.where(probability == 0.0, 0.0, probability * (log - log_other))",
            "probability * (log - log_other)",
        ),
        ("mask", "- p * mean) * factor", ") * factor"),
        ("index", "mask=columns < VOCAB, other=", "mask=columns <= VOCAB, other="),
        tests=("tests/test_triton_divergence.py",),
    ),
    *_of(
        "execution/distillation.py",
        ("mask", "rows.mask_ignored(of_rows.to(operands.row_dtype))", "of_rows.to(operands.row_dtype)"),
        ("index", "x = rows.gather_chunk(teacher.x, chunk)", "x = teacher.x[chunk]"),
        (
            "index",
            "None if factors is None else factors[chunk]",
            "None if factors is None else factors[: len(factors[chunk])]",
        ),
        tests=("tests/test_kl_divergence.py",),
    ),
    *_of(
        "kl_divergence.py",
        ("divisor", "known.options.expected_gradient or 1.0", "1.0"),
        ("mask", "options.expected_gradient is None)", "False)"),
        ("divisor", "replace(problem, teacher_dtype=teacher_x.dtype, ", "replace(problem, "),
        tests=("tests/test_kl_divergence.py",),
    ),
    *_of(
        "graph/decomposition.py",
        ("mask", "ltorch.where(ltorch.eq(probability, 0.0), 0.0, shifted)", "shifted"),
        tests=(f"{TRACED}_with_masked_columns",),
    ),
    *_of(
        "graph/decomposition.py",
        ("mask", "ltorch.where(is_label, target_weights, 0.0)", "target_weights"),
        tests=("tests/test_target_weights.py",),
    ),
    *_of(
        "graph/matching/upstream.py",
        ("sign", "Step(shape, lambda grad: -grad)", "Step(shape, lambda grad: grad)"),
        ("divisor", "grad = grad / divisor if divisor != 1 else grad", "pass"),
        ("divisor", "return ltorch.true_divide(grad, given) if", "return ltorch.mul(grad, given) if"),
        ("mask", "        if factor.name in index.need_grad:\n", "        if False:\n"),
        ("mask", "if len(users) == 1 else None", "if users else None"),
        ("index", " or tuple(user.output.shape) != shape", ""),
        ("sign", "return grad if self.factor == 1 else -grad", "return grad"),
        tests=("tests/test_token_weights.py", "tests/test_token_loss.py::test_programs"),
    ),
    *_of(
        "graph/rewrite.py",
        ("index", "has_to_wait = self._waits(match)", "has_to_wait = False"),
        tests=("tests/test_token_loss.py::test_heads_that_wait_for_each_other", "tests/test_readings.py"),
    ),
    *_of(
        "graph/matching/match.py",
        ("index", "(*self.path.operands, self.arguments.target, ", "("),
        tests=("tests/test_token_loss.py::test_heads_that_wait_for_each_other", "tests/test_readings.py"),
    ),
    *_of(
        "graph/transform.py",
        ("index", "if id(bsym) in places or is_negated_sum:", "if False:"),
        ("index", "if id(bsym) in places or is_negated_sum:", "if id(bsym) in places:"),
        tests=("tests/test_token_weights.py",),
    ),
    *_of(
        "execution/engine.py",
        ("divisor", "RowScales(rows) if has_units else scales", "scales"),
        tests=("tests/test_frozen_head.py",),
    ),
    *_of(
        "execution/gradient_accumulation.py",
        ("mask", "input_dtype = operands.row_dtype if is_unit else operands.dtype", "input_dtype = operands.dtype"),
        ("mask", "None if memory is None or memory.dtype != dtype else memory", "memory"),
        tests=("tests/test_frozen_head.py", "tests/test_rows.py"),
    ),
    *_of(
        "execution/gradient_accumulation.py",
        ("mask", "if is_last and self.needs_first_block:", "if False:"),
        ("mask", "or not 0 < enough <= first.stop:", "or not enough:"),
        ("mask", "self.needs_first_block = True\n", "self.needs_first_block = False\n"),
        tests=("tests/test_terms.py::test_every_plan",),
    ),
    *_of(
        "operation/problem.py",
        (
            "mask",
            "is_frozen = not (self.bias_grad or self.weight_grad_columns)",
            "is_frozen = not self.weight_grad_columns",
        ),
        ("mask", " and len(self.terms) == 1", ""),
        tests=("tests/test_frozen_head.py",),
    ),
    *_of(
        "operation/loss.py",
        ("mask", "self.z_loss or others)", "self.z_loss)"),
        ("mask", " and name not in self.detached)", ")"),
        tests=("tests/test_frozen_head.py",),
    ),
    *_of(
        "graph/matching/upstream.py",
        ("sign", "factors.append((-1.0, False))", "pass"),
        ("divisor", "factors.append((others[0], is_divided))", "factors.append((others[0], False))"),
        ("mask", " and index.exists_before(factor, loss)", ""),
        ("mask", " and factor != 0", ""),
        ("mask", "user.sym.id in _DIVISIONS and not is_second", "user.sym.id in _DIVISIONS"),
        tests=("tests/test_upstream.py::test_which_factors_are_found",),
    ),
    *_of(
        "graph/rewrite.py",
        ("mask", "number if value.dtype.bytes >= 4 else _rounded(", "number if True else _rounded("),
        ("mask", 'if region["input"].dtype == dtypes.float16 and self', "if False and self"),
        ("mask", "return ltorch.where(is_usable, tensor, 1.0)", "return tensor"),
        ("mask", "elif factor.name not in self._missing:", "else:"),
        ("divisor", "number / factor if divides else number * factor", "number * factor"),
        tests=("tests/test_upstream.py",),
    ),
    *_of(
        "execution/engine.py",
        ("divisor", "torch.float32)) / expected_gradient", "torch.float32))"),
        ("mask", "region.scalar(1.0) if expected is None else expected", "region.scalar(1.0)"),
        tests=("tests/test_upstream.py::test_another_upstream_gradient_is_right_too", PROGRAM),
    ),
    *_of(
        "registration.py",
        ("mask", 'if "thunder" in sys.modules:', "if False:"),
        ("mask", "else:\n        sys.meta_path.insert(0, _ThunderFinder())", ""),
        ("mask", "except Exception as error:", "except ZeroDivisionError as error:"),
        tests=("tests/test_imports.py",),
    ),
    *_of(
        "modules.py",
        ("mask", "weight=self.weight,", "weight=None,"),
        ("mask", "num_items=num_items,", "num_items=None,"),
        ("mask", "if given != shape:", "if False:"),
        ("mask", "found.ndim == 2", "True"),
        ("index", "loss.linear = linear", "loss.linear.weight = linear.weight"),
        ("mask", "isinstance(output[0], Tensor) and output[0].ndim == 0", "isinstance(output[0], Tensor)"),
        ("mask", 'torch.compiler.disable(raise_no_loss, reason="raises an error")', "raise_no_loss"),
        ("index", '"__dict__", vars(module)', '"__dict__", vars(module).copy()'),
        ("index", "(_same(self, model_class),)", "(self,)"),
        tests=("tests/test_modules.py",),
    ),
    *_of(
        "graph/thunder_private.py",
        ("mask", "_use_lazy_graph_module(False)(", "_use_lazy_graph_module(True)("),
        tests=("tests/test_fx.py::test_graphs_have_their_code",),
    ),
    *_of(
        "graph/plugin.py",
        ("sign", "LooseVersion(installed) > LooseVersion", "LooseVersion(installed) >= LooseVersion"),
        ("mask", 'startswith("transformers.")', 'startswith("")'),
        tests=("tests/test_models.py::test_a_transformers_that_thunder_does_not_trace",),
    ),
    *_of(
        "graph/dynamo/writing.py",
        ("mask", "if node in kept or node not in with_results:", "if node in kept:"),
        tests=("tests/test_model_zoo.py::test_backend[litgpt Gemma 3]",),
    ),
    *_of(
        "compatibility.py",
        ("mask", "if not hasattr(torch.Tensor, name):", "if hasattr(torch.Tensor, name):"),
        ("mask", 'if not hasattr(Function.apply, "__func__"):', "if False:"),
        ("index", "builtin.__get__(None, cls)", "builtin.__get__(None, Function)"),
        tests=("tests/test_imports.py",),
    ),
    *_of(
        "__init__.py",
        ("mask", "except Exception as error:", "except ZeroDivisionError as error:"),
        tests=("tests/test_imports.py",),
    ),
    *_of(
        "graph/unfused_cross_entropy/nvfuser_impl.py",
        ("sign", "ops.sub(target_logit, row_max)", "ops.add(target_logit, row_max)"),
        ("divisor", "loss = ops.div(loss, ops.cast(valid_count, DataType.Float))", "pass"),
        ("mask", "ops.where(valid, loss, zero)", "loss"),
        ("index", "_scalar(fd, 0), _scalar(fd, 1), dtype", "_scalar(fd, 0), _scalar(fd, 2), dtype"),
        tests=(NVFUSER,),
    ),
    *_of(
        "bench/shapes.py",
        ("sign", "noise - log_frequency[drawn]", "noise + log_frequency[drawn]"),
        ("sign", "log_frequency = -(ranks.log() +", "log_frequency = (ranks.log() +"),
        ("divisor", "(log_frequency / 256)[:, None]", "log_frequency[:, None]"),
        ("mask", "torch.where(self.target < 0, self.target, drawn)", "drawn"),
        tests=("tests/test_bench.py::test_peaked_data",),
    ),
    *_of(
        "bench/reference.py",
        ("divisor", 'reduction="sum") / (inputs.target != -100).sum()', 'reduction="sum")'),
        ("index", "gradient[:, :vocab]", "gradient[:, -vocab:]"),
        tests=("tests/test_bench.py::test_the_matmuls_that_times_are_compared_with_have_the_dlogits_of_the_loss",),
    ),
    *_of(
        "bench/reference.py",
        ("mask", "if count > 2:", "if count > 4:"),
        tests=("tests/test_bench.py::test_the_first_matmuls",),
    ),
    *_of(
        "bench/losses.py",
        ("sign", "chosen - rejected", "chosen + rejected"),
        ("sign", "return F.linear(x, weight).float()", "return -F.linear(x, weight).float()"),
        ("divisor", "-(log_probs * weights).sum() / weights.sum()", "-(log_probs * weights).sum() / weights.max()"),
        ("index", "@ upstream[rows]", "@ upstream.flip(0)[rows]"),
        ("index", '_FLOORS[numbers[name]["matmuls"]]', "_FLOORS[3]"),
        tests=("tests/test_bench.py::test_losses", "tests/test_bench.py::test_what_the_losses_are"),
    ),
    *_of(
        "bench/losses.py",
        ("mask", 'strict=True),\n    "torch.compile"', 'strict=False),\n    "torch.compile"'),
        tests=("tests/test_bench.py::test_a_loss_that_is_not_fused_fails",),
    ),
    *_of(
        "bench/losses.py",
        ("sign", "-function(x, weight, target)", "function(x, weight, target)"),
        ("mask", "filter_eps=None", 'filter_eps="auto"'),
        ("index", "log_probs = LOG_PROBS[way]()", 'log_probs = LOG_PROBS["eager"]()'),
        tests=("tests/test_bench.py::test_losses_of_peers",),
    ),
    *_of(
        "bench/energy.py",
        ("divisor", "(last - first) / 1e3 / (end - start)", "(last - first) / (end - start)"),
        ("index", "self._moves[0], self._moves[-1]", "self._moves[0], self._moves[1]"),
        tests=("tests/test_bench.py::test_power_between_moves_of_the_counter",),
    ),
    *_of(
        "bench/measuring.py",
        ("divisor", "self.median(TOTAL) / 1e3 if", "self.median(TOTAL) if"),
        ("mask", "watts for _, watts in turns if watts is not None", "watts or 0 for _, watts in turns"),
        tests=("tests/test_bench.py::test_energy_of_a_call",),
    ),
    *_of(
        "bench/profiling.py",
        ("mask", " and not event.is_user_annotation", ""),
        ("sign", "total += max(end - max(start, reached), 0)", "total += end - start"),
        ("index", "reached = max(reached, end)", "reached = end"),
        ("divisor", "/ 1e3 / calls", "/ 1e3"),
        tests=("tests/test_bench.py::test_exposed_collectives_of_a_step", EXPOSED),
    ),
    *_of(
        "planning/traffic.py",
        ("mask", " and not shard.sequence_parallel", ""),
        ("mask", "(2 if is_all_reduce else 1)", "1"),
        ("mask", "term.weight_grad * (", "("),
        ("divisor", "moved * of_others", "moved"),
        tests=("tests/test_thunder_ranks.py::test_explain_says_what_ranks_move",),
    ),
    *_of(
        "bench/soak.py",
        ("index", "zip(held[-1], held[1], strict=True)", "zip(held[1], held[1], strict=True)"),
        ("index", "(number * COUNTS + place, what)", "(number * COUNTS, what)"),
        ("mask", "device=target.device) < ignored", "device=target.device) > 1"),
        tests=(
            "tests/test_bench.py::test_a_soak_of_a_method_that_grows",
            "tests/test_bench.py::test_a_soak_counts_compilations",
        ),
    ),
    *_of(
        "bench/convergence.py",
        ("index", "target=sequences[:, 1:].flatten()", "target=sequences[:, :-1].flatten()"),
        ("sign", "0.55 + 0.45 * math.cos", "0.55 - 0.45 * math.cos"),
        tests=("tests/test_bench.py::test_what_is_trained_on",),
    ),
    *_of(
        "graph/matching/logits_path.py",
        ("mask", "if path.shift and bsym.sym.id not in _SHIFT_INVARIANT:", "if False:"),
        tests=("tests/test_patterns.py::test_not_fused",),
    ),
    *_of(
        "kl_divergence.py",
        ("mask", "    check_needed(dict(zip(_OPERANDS, tensors, strict=True)), Settings.parse(settings))\n", ""),
        ("index", 'operators.library.impl("linear_kl_divergence", _autograd_kernel, "Autograd")', "pass"),
        tests=("tests/test_kl_divergence.py",),
    ),
    Mutation(
        "mask",
        "graph/thunderfx.py",
        "if node.kwargs or not (",
        "if not (",
        ("tests/test_fx.py::test_products_of_matrices",),
    ),
    Mutation(
        "index",
        "loss_nodes.py",
        "is_gather and source not in",
        "is_gather or source not in",
        (f"{BACKEND}::test_a_graph_without_a_loss_needs_no_thunder",),
    ),
    Mutation(
        "mask",
        "graph/dynamo/tracing.py",
        '"unbind", "mean")',
        '"unbind")',
        (f"{BACKEND}::test_any_number_of_tokens",),
    ),
    Mutation(
        "divisor",
        "graph/dynamo/writing.py",
        'if region["token_weights"] is not None:',
        "if False:",
        (f"{BACKEND}::test_any_number_of_tokens",),
    ),
    Mutation(
        "index",
        "graph/dynamo/sizes.py",
        "next(self._primes)",
        "24",
        (f"{BACKEND}::test_any_number_of_tokens",),
    ),
    Mutation(
        "index",
        "graph/dynamo/tracing.py",
        "if isinstance(proxy, TensorProxy) and not value.requires_grad:",
        "if False:",
        (f"{BACKEND}::test_no_grad_inside",),
    ),
    Mutation(
        "mask",
        "graph/dynamo/tracing.py",
        "    _spell_out_autocast(graph)\n",
        "",
        (f"{BACKEND}::test_autocast",),
    ),
    Mutation(
        "index",
        "graph/dynamo/writing.py",
        "for node in (loss, *operands))",
        "for node in operands)",
        (f"{BACKEND}::test_fused",),
    ),
    Mutation(
        "mask",
        "graph/dynamo/writing.py",
        "        if position > self._positions[node]:\n",
        "        if False:\n",
        (f"{BACKEND}::test_fused",),
    ),
    Mutation(
        "mask",
        "graph/dynamo/writing.py",
        "        if name not in needs_grad:\n",
        "        if False:\n",
        (f"{BACKEND}::test_no_grad_inside",),
    ),
    Mutation(
        "index",
        "graph/dynamo/sizes.py",
        "if statically_known_true(size == other)",
        "if False",
        (f"{BACKEND}::test_labels_with_sizes_of_their_own",),
    ),
    Mutation(
        "index",
        "graph/dynamo/tracing.py",
        "                region.sizes.number(size)\n",
        "                pass\n",
        (f"{BACKEND}::test_labels_with_sizes_of_their_own",),
    ),
    Mutation(
        "mask",
        "graph/dynamo/fusion.py",
        "    transform.report(decisions)\n",
        "",
        (f"{BACKEND}::test_a_loss_that_is_not_traced_is_reported",),
    ),
    Mutation(
        "index",
        "graph/dynamo/tracing.py",
        "disable_autocast(), with_defaults():",
        "disable_autocast():",
        (f"{BACKEND}::test_rows_counted_on_the_default_device",),
    ),
    Mutation(
        "mask",
        "graph/dynamo/writing.py",
        "is_off = not self._has_grad[position]",
        "is_off = False",
        (f"{BACKEND}::test_old_log_probabilities_without_grad",),
    ),
    Mutation(
        "mask",
        "execution/engine.py",
        "grad = grad.to(torch.promote_types(grad.dtype, torch.float32)) / expected_gradient",
        "pass",
        (OPERATOR,),
    ),
    Mutation(
        "mask",
        "inductor.py",
        "isinstance(gradient.data.data, ir.DonatedBuffer)",
        "isinstance(gradient.data.data, ir.Buffer)",
        (f"{OPERATOR}::test_finished_gradients_are_scaled_in_their_memory",),
    ),
]


def main() -> int:
    """Runs the mutations and prints what became of them; fails unless all were caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="mutations whose file or text contain this")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many run at a time (default: 1)")
    arguments = parser.parse_args()
    chosen = arguments.only
    mutations = [m for m in MUTATIONS if chosen in str(m.path) or chosen in m.before]
    table = Table("file", "kind", "change", "outcome", title="Mutations")
    survivors = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = pool.map(_outcome, mutations)
        progress = track(outcomes, "Running", total=len(mutations), console=Console(stderr=True))
        for mutation, outcome in zip(mutations, progress, strict=True):
            survivors += outcome != "caught"
            table.add_row(mutation.file, mutation.kind, Text(f"{mutation.before}\n→ {mutation.after}"), outcome)
    Console(width=160).print(table)
    return 1 if survivors else 0


def _outcome(mutation: Mutation) -> str:
    """ "caught", "SURVIVED", or why its tests have proved nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repository")
        for name in ("thunder_flce", "tests", "traces"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / mutation.path
        path.write_text(mutation.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        search_path = [str(copy), str(copy / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-profile=mutations",
        ]
        process = subprocess.run([*command, *mutation.tests], cwd=copy, env=environment, capture_output=True, text=True)
    # 1: tests have failed. Anything else, such as tests that are not there, is no proof.
    return {0: "SURVIVED", 1: "caught"}.get(
        process.returncode, f"NO PROOF: {process.stdout[-500:]}{process.stderr[-500:]}"
    )


if __name__ == "__main__":
    sys.exit(main())
