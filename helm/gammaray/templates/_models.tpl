{{/* JSON list of the models to download from the hub: neither the demo pair, directories nor early exits. */}}
{{- define "gammaray.hubModels" -}}
{{- $models := list -}}
{{- $names := list .Values.models.target -}}
{{- if ne (toString .Values.draft.workers) "0" -}}
{{- $names = append $names .Values.models.draft -}}
{{- end -}}
{{- range uniq $names -}}
{{- if not (or (eq . "demo") (hasPrefix "/" .) (hasPrefix "." .) (hasPrefix "early-exit:" .)) -}}
{{- $models = append $models . -}}
{{- end -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{/* "true" if a Job downloads models into the shared cache, which Serve waits for. */}}
{{- define "gammaray.downloads" -}}
{{- if and .Values.modelCache.enabled .Values.modelCache.download.enabled (include "gammaray.hubModels" . | fromJsonArray) -}}
true
{{- end -}}
{{- end -}}

{{/*
JSON list of the marks that the Job writes for the models of a role: (dict "root" $ "role" name). They are in the Serve
configuration, not in pods: another model must not change the RayCluster.
*/}}
{{- define "gammaray.modelMarks" -}}
{{- $marks := list -}}
{{- if include "gammaray.downloads" .root -}}
{{- $names := list .root.Values.models.target -}}
{{- if eq .role "draft" -}}
{{- $names = append $names .root.Values.models.draft -}}
{{- end -}}
{{- $downloaded := include "gammaray.hubModels" .root | fromJsonArray -}}
{{- range uniq $names -}}
{{- if has . $downloaded -}}
{{- $marks = append $marks (printf "/models/ready/%s" (replace "/" "--" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $marks -}}
{{- end -}}

{{/* The pod that downloads models. */}}
{{- define "gammaray.downloadPod" -}}
{{- include "gammaray.patchedPod" (dict "root" . "component" "models" "pod" (include "gammaray.ownDownloadPod" .)) -}}
{{- end -}}

{{- define "gammaray.ownDownloadPod" -}}
{{- $pod := dict "root" . "component" "models" "user" 1000 "image" (include "gammaray.image" (dict "root" . "name" "orchestrator")) -}}
{{- $values := include "gammaray.podValues" $pod | fromYaml -}}
metadata: {{- include "gammaray.podMetadata" $pod | nindent 2 }}
spec:
  restartPolicy: OnFailure
  {{- include "gammaray.podSpec" $pod | nindent 2 }}
  containers:
    - name: download
      {{- include "gammaray.container" $pod | nindent 6 }}
      command:
        - python
        - -c
        - {{ .Files.Get "files/download_models.py" | quote }}
        - /models/ready
        {{- range include "gammaray.hubModels" . | fromJsonArray }}
        - {{ . | quote }}
        {{- end }}
      env: {{- include "gammaray.env" (dict "own" (include "gammaray.downloadEnv" .) "values" $values) | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /models}
        {{- with $values.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    - name: models
      persistentVolumeClaim:
        claimName: {{ include "gammaray.modelsClaim" . | quote }}
    {{- with $values.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "gammaray.downloadEnv" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /models/huggingface}
{{- with .Values.huggingFaceTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- end -}}
