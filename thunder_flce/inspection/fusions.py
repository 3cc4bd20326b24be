"""The nvFuser definitions of the fusions that regions take, as far as nvFuser runs their row work."""

from collections.abc import Iterable

from thunder_flce.execution.plan import Plan
from thunder_flce.execution.row_kernels import dispatch
from thunder_flce.operation.problem import Problem
from thunder_flce.planning.program import program


def fusion_definitions(regions: Iterable[tuple[Problem, Plan]]) -> dict[str, str]:
    """Each definition as nvFuser prints it, by its direction and name, such as "backward: gradient".

    They are in the order of their first use; where two of one name differ, the names are numbered.
    """
    texts: dict[str, list[str]] = {}
    for problem, plan in regions:
        for direction, stages in program(problem, plan).directions.items():
            steps = (step for stage in stages for step in stage.every_step())
            for work in dict.fromkeys(work for step in steps for work in step.fusions):
                for name, fusion in dispatch.definitions(work, problem.loss.logit_map).items():
                    of_name, text = texts.setdefault(f"{direction}: {name}", []), str(fusion).strip()
                    if text not in of_name:
                        of_name.append(text)
    return {
        f"{name} {number}" if number > 1 else name: text
        for name, of_name in texts.items()
        for number, text in enumerate(of_name, 1)
    }
