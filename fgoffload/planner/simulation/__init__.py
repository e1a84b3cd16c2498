"""What a plan comes to: a step of all pipeline ranks, pass by pass, with its copies and its memory."""
