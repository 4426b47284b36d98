"""``varprop inspect``: models and data by name, the inspection, and what it writes."""
