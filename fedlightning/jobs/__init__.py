"""What the commands do: experiments and studies, recorded and watched."""
