"""A lab is an evening's work, or two: a student writes functions removed from a step's code.

    python -m extras.labs start 4 FOLDER       a folder with the step, some functions of which only
                                               raise NotImplementedError
    python -m extras.labs check FOLDER         points by task
    python -m extras.labs grade FOLDERS > points.csv

The step's own tests in tests/ judge the work: the decorator `task` gives the task and the points
of each test. A lab consists of an entry of TASKS below and of labN.md, which says for each task how
many minutes it takes and what to read, and gives three hints. At the end it asks a question, which
is answered in writing and graded by hand.

The folder holds all that the step needs: earlier steps, common/ and the tests, but no solution.
You can run pytest there. From the folder, `check` and `grade` take only LAB.md's title and the
files with removed functions. All else comes from the project, so changed tests have no effect.
"""

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Lab -> task -> the functions and methods that are removed ("holes"); "module:function" if they are
# not in the step. If a task has no holes, its tests try the whole file.
TASKS: dict[int, dict[str, str]] = {
    1: {
        "learning rate": "learning_rate",
        "adamw": "decay_groups adamw sgd",
        "masters": "accumulate_wide Optimizer.__init__ Optimizer.gradients update "
        "Optimizer.publish Optimizer.zero_grad",
        "recomputation": "recompute_layers",
        "loop": "train",
    },
    2: {
        "naive": "NaiveSync.finish NaiveSync.sum_up",
        "ring": "RingSync.sum_up",
        "buckets": "Bucket.__init__ fill_buckets",
        "bucket sync": "BucketSync.__init__ BucketSync.begin BucketSync.count_addition "
        "BucketSync.finish",
        "loop": "train",
    },
    3: {
        "units": "Unit.view_in Unit.own_part unit_names",
        "stage 1": "Zero1.begin Zero1.add_gradient Zero1.sum_is_due Zero1.start_sum "
        "Zero1.complete_sums Zero1.finish Zero1.gradients",
        "update": "Zero1.publish Zero1.zero_grad",
        "stage 2": "Zero2.sum_is_due Zero2.start_sum",
        "gather": "ShardedUnit.gather ShardedUnit.free",
        "stage 3": "Zero3.before_forward Zero3.after_forward Zero3.before_backward Zero3.start_sum "
        "Zero3.publish",
        "loop": "",
    },
    4: {
        "collectives": "sum_over_ranks gather_tokens sum_and_shard_tokens",
        "f and g": "CopyToTensorParallel.forward CopyToTensorParallel.backward "
        "ReduceFromTensorParallel.forward ReduceFromTensorParallel.backward "
        "GatherFromSequenceParallel.forward GatherFromSequenceParallel.backward "
        "ReduceScatterToSequenceParallel.forward ReduceScatterToSequenceParallel.backward "
        "enter_parallel leave_parallel",
        "vocabulary": "VocabParallelEmbedding.forward VocabParallelCrossEntropy.forward",
        "shards": "shard_param by_columns by_rows by_heads shard_vocabulary shard_tensors",
        "partial gradients": "sum_partial_gradients",
        "loop": "",
    },
    5: {
        "parts": "scaled_scores part_attention merge",
        "zigzag": "ordered_positions ordered_visible zigzag_positions zigzag_visible",
        "gradients of a part": "part_gradients",
        "ring": "travel RingAttention.forward RingAttention.backward",
        "loop": "ring_attention shard_context own_tokens",
    },
    6: {
        "orders": "common.schedules:order_with_warm_up common.schedules:afab "
        "common.schedules:one_f_one_b common.schedules:interleaved",
        "stage": "Stage.compute_output Stage.forward Stage.backward",
        "messages": "Pipeline.send_receive AllForwardAllBackward.execute "
        "OneForwardOneBackward.execute",
        "programs": "common.schedules:add_messages ListPipeline.execute",
        "keep": "keep_layers",
        "loop": "",
    },
    7: {
        "experts": "expert_product Experts.forward",
        "layer": "MoE.probabilities MoE.choose MoE.score MoE.outputs_of_choices count_choices "
        "MoE.forward",
        "balance": "AddGradientOfLoss.forward AddGradientOfLoss.backward LossBalancedMoE.aux_loss "
        "LossBalancedMoE.balance BiasBalancedMoE.choose BiasBalancedMoE.balance "
        "BiasBalancedMoE.end_step",
        "dispatch": "transpose_blocks send_rows SendRows.backward dispatch combine "
        "exchange_counts MoE.run_experts",
        "groups": "check_experts make_groups shard_moe shard_experts",
        "loop": "",
    },
}


def step_of(lab: int) -> str:
    """The file name of the lab's step, such as step04_tp_sp.py."""
    return next(ROOT.glob(f"step{lab:02d}_*.py")).name


def holes(lab: int) -> dict[str, dict[str, str]]:
    """The removed functions: file -> {name: task}. Students hand in these files, the step first."""
    found: dict[str, dict[str, str]] = {step_of(lab): {}}
    for task, names in TASKS[lab].items():
        for name in names.split():
            module, _, own = name.rpartition(":")
            file = f"{module.replace('.', '/')}.py" if module else step_of(lab)
            found.setdefault(file, {})[own] = task
    return found


def ours(lab: int) -> dict[str, str]:
    """The solution: the project's own text of each file that has holes."""
    return {file: (ROOT / file).read_text() for file in holes(lab)}


def definitions(text: str) -> dict[str, ast.FunctionDef]:
    """All functions ("name") and methods ("Class.name") of a source. Raises SyntaxError."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(text).body:
        found |= {node.name: node} if isinstance(node, ast.FunctionDef) else {}
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            found |= {f"{node.name}.{part.name}": part} if isinstance(part, ast.FunctionDef) else {}
    return found


def with_bodies(text: str, bodies: dict[str, str]) -> str:
    """A source in which some functions keep only signature and docstring: their body is another."""
    lines, found = text.splitlines(), definitions(text)
    for name in sorted(bodies, key=lambda name: -found[name].lineno):
        node, documented = found[name], ast.get_docstring(found[name]) is not None
        start = node.body[0].end_lineno + 1 if documented else node.body[0].lineno
        body = textwrap.indent(bodies[name], " " * (node.col_offset + 4))
        lines[start - 1 : node.end_lineno] = body.splitlines()
    return "\n".join(lines) + "\n"


def hollow(lab: int) -> dict[str, str]:
    """The files for a student: the removed functions only raise NotImplementedError."""
    texts = ours(lab)
    for file, tasks in holes(lab).items():
        bodies = {}
        for name, task in tasks.items():
            bodies[name] = f'raise NotImplementedError("task {task}: {name}")'
        texts[file] = with_bodies(texts[file], bodies)
    return texts
