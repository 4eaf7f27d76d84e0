"""Add up the kernels of a pass that Nsight Compute measured (CSV on standard input), as a table in Markdown on standard output.

    kernel_times.py FIGURES MODEL ELEMENT PRODUCTS TOKENS
    kernel_times.py metrics    names the metrics that it wants, as ncu takes them

One JSON line for the whole pass goes to the end of the file FIGURES. Times are those of each kernel alone, without the gaps between
them; the caches are flushed before each, and clocks are the GPU's own. Ends with 1 if there are no kernels.
"""

import csv
import json
import sys

TIME = "gpu__time_duration.sum"
# Beside the time: the title of a column, and its metric, a share of the most that the GPU can do or a plain number. The instructions of
# tensor cores are no measure of their load: one wgmma does the work of many mma.
COLUMNS = {
    "memory, %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor instructions, %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "issue, %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps, %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}


def number(text):
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def measured(lines):
    """Each launch as a dict: its kernel, grid and block, and metrics by name."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    launches = {}
    for row in rows:
        if not row["ID"]:
            # The units.
            continue
        own = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"], "grid": row["Grid Size"], "block": row["Block Size"]})
        if "Metric Name" in row:
            own[row["Metric Name"]] = number(row["Metric Value"])
        else:
            own.update((name, number(text)) for name, text in row.items() if "__" in name)
    return list(launches.values())


def main(figures, model, element, products, tokens):
    launches = [launch for launch in measured(sys.stdin) if launch.get(TIME) is not None]
    if not launches:
        sys.exit("the profiler measured no kernels")
    kinds = {}
    for launch in launches:
        kinds.setdefault((launch["kernel"], launch["grid"], launch["block"]), []).append(launch)
    total = sum(launch[TIME] for launch in launches)
    print(f"{len(launches)} launches, {total / 1e3:.0f} us without the gaps between them.\n")
    print("| kernel | grid, block | launches | us each | share |" + "".join(f" {title} |" for title in COLUMNS))
    print("|---|---|---|---|---|" + "---|" * len(COLUMNS))
    for (kernel, grid, block), own in sorted(kinds.items(), key=lambda kind: -sum(launch[TIME] for launch in kind[1])):
        time = sum(launch[TIME] for launch in own)
        means = ""
        for metric in COLUMNS.values():
            known = [launch[metric] for launch in own if launch.get(metric) is not None]
            means += f" {sum(known) / len(known):.0f} |" if known else " - |"
        sizes = f"{grid} {block}".replace(" ", "").replace(")(", ") (")
        print(f"| {kernel[:80]} | {sizes} | {len(own)} | {time / len(own) / 1e3:.1f} | {time / total * 100:.1f} % |{means}")
    line = {"figure": "kernels", "model": model, "element": element, "products": products, "tokens": int(tokens)}
    with open(figures, "a", encoding="utf-8") as file:
        print(json.dumps(line | {"launches": len(launches), "us": total / 1e3}), file=file)


if sys.argv[1:] == ["metrics"]:
    print(",".join([TIME, *COLUMNS.values()]))
else:
    main(*sys.argv[1:])
