"""Pictures of the planner: memory and time of some layouts, stacked by kind; speed by number of GPUs."""

from theory.footprint import Held
from theory.gpus import GIB, Gpu
from theory.search import Found


def draw(best: list[Found], gpu: Gpu, path: str, title: str):
    """The layouts' memory (left) and time (right) as stacked bars, into a .png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 1.2 + 0.5 * len(best)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    x0 = best[0].layout
    names = []
    for number, found in enumerate(best, 1):
        x = found.layout
        sizes = f"pp{x.pp} dp{x.dp} cp{x.cp} tp{x.tp}" + f" ep{x.ep}" * (x.ep > 1 or x0.ep > 1)
        names.append(f"{number}: {sizes} b{x.mbs} ZeRO {x.zero}\n{x.schedule} {x.chunks}, recompute {x.recompute}")
    kinds = {kind: [getattr(found.held, kind) / GIB for found in best] for kind in Held._fields}
    dims = sorted({dim for found in best for dim in found.seconds.exposed})
    parts = {"compute": [found.seconds.compute for found in best], "again": [f.seconds.recompute for f in best]}
    parts["bubble"] = [found.seconds.bubble for found in best]
    parts |= {f"exposed {dim}": [found.seconds.exposed.get(dim, 0.0) for found in best] for dim in dims}
    parts["update"] = [found.seconds.update for found in best]
    for axes, groups, label in ((left, kinds, "GiB of a GPU"), (right, parts, "seconds of a step")):
        start = [0.0] * len(best)
        for name, values in groups.items():
            axes.barh(names, values, left=start, label=name)
            start = [a + b for a, b in zip(start, values, strict=True)]
        axes.set_xlabel(label)
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
    left.axvline(gpu.memory / GIB, color="black", linestyle="--")
    left.invert_yaxis()
    left.tick_params(axis="y", labelsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
