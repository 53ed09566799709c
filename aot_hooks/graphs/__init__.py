"""Facts about the forward and backward graphs: saved values, their readers, sizes, costs. Nothing here changes a graph.

`saved.boundary` lists the values that cross from the forward to the backward. `backward_reads` tells how the backward
reads each of them, by the tables in `read_tables`. `roofline` and `fusion_memory` estimate time and bytes. `layout`
finds the order of a tensor's dimensions in memory.
"""
