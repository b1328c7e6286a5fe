"""Plugins that engines find by their entry points. Without ``VMMGRAPH=1`` they do nothing.

========================  ====================================  ===================================
entry point group         function                              file
========================  ====================================  ===================================
``vllm.general_plugins``  ``vmmgraph.plugins.vllm:enable``      ``vllm.py``; its KV: ``vllm_kv.py``
``sglang.srt.plugins``    ``vmmgraph.plugins.sglang:enable``    ``sglang.py``
========================  ====================================  ===================================
"""
