"""Engine plugins, found through entry points. Plugins do nothing unless ``VMMGRAPH=1`` is set.

========================  ====================================  ====================================
entry point group         function                              file
========================  ====================================  ====================================
``vllm.general_plugins``  ``vmmgraph.plugins.vllm:enable``      ``vllm.py``; its KV: ``vllm_kv*.py``
``sglang.srt.plugins``    ``vmmgraph.plugins.sglang:enable``    ``sglang.py``
========================  ====================================  ====================================
"""
