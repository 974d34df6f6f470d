"""Recovery: from facts to the plan that all ranks carry out."""
