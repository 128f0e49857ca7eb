"""What a corpus of caches costs, before any of them is computed: bytes, time and money, by tier and codec.

corpus in lengths of chunks + outline of a model -> bytes of its entries, as the store itself writes them
rates of a machine -> time; prices -> money; both together -> from which bandwidth on loading beats computing
"""
