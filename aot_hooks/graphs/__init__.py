"""Facts about the forward and backward graphs: saved values, their readers, sizes, costs. Nothing here changes a graph.

`saved.boundary` lists the values that cross; `backward_reads` tells how the backward reads them, by `read_tables`.
"""
