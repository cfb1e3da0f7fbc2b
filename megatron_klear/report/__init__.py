"""What a person sees of a run: metrics, samples, curves, the HTML report, lines on the terminal. No torch."""
