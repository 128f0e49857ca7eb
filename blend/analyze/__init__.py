"""Attention, KV deviation and what blending restores, on one prompt or a dataset, as JSON and a self-contained page.

PromptLayout -> study.analyze_prompt -> PromptAnalysis -> numbers.summarize -> Numbers, averaged over prompts
-> document.analysis_document (JSON value) -> document.write_page (HTML)
"""
