"""Scripts that run real models, for `python -m examples.<name>` from the root of the repository.

The case studies are `dlrm`, `fusion_arithmetic` and `graph_breaks`; their pages are in
docs/case_studies.
"""
