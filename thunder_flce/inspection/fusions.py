"""The nvFuser definitions of the fusions that a plan runs."""

from thunder_flce.plan import Plan, Problem, layout_for
from thunder_flce.steps import backward_stages, forward_stages


def fusion_names(problem: Problem, plan: Plan) -> list[str]:
    """The fusions that the plan's steps name, in the order of their first use; none on a CPU."""
    stages = (*forward_stages(problem, plan), *backward_stages(problem, plan))
    return list(dict.fromkeys(name for stage in stages for step in stage.steps for name in step.fusions))


def fusion_definitions(problem: Problem, plan: Plan) -> dict[str, str]:
    """The definition of each fusion of a plan, as nvFuser prints it, by the name that the steps have for it.

    The gradient of "recompute_logits" is that of a whole slab; what is left for the last one has a definition of its
    own where V is not a multiple of the slab.
    """
    names = fusion_names(problem, plan)
    if not names:
        return {}
    from thunder_flce.row_kernels import nvfuser

    layout, dtype = problem.layout, problem.dtype
    columns = plan.slab_columns or problem.vocab
    row_stride = layout_for(columns, dtype=dtype, device_type=problem.device_type).row_stride
    build = {
        "part_statistics": lambda: nvfuser.part_statistics_fusion(layout.part_length, dtype),
        "merge_parts": lambda: nvfuser.merge_parts_fusion(layout.parts, dtype),
        "gradient": lambda: nvfuser.gradient_fusion(row_stride, dtype, column_sums=False),
        "gradient_with_column_sums": lambda: nvfuser.gradient_fusion(row_stride, dtype, column_sums=True),
        "target_gradient": lambda: nvfuser.target_gradient_fusion(dtype),
    }
    return {name: str(build[name]()).strip() for name in names}
