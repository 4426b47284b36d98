"""How large gradients are: second moments followed back through the captured graph."""
